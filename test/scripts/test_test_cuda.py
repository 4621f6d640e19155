"""`make test-cuda` refuses in one line before it downloads anything, and removes nothing that it has not made."""

import os

import pytest

from benchmark.common.paths import ROOT
from programs import read_line, run_program, write_program


@pytest.fixture
def run(tmp_path):
    """A function (**environment) that runs the script with compilers that do nothing and a pip that fails."""
    for name in ("g++", "nvcc"):
        write_program(tmp_path / name, "#!/bin/sh\n")
    # Python's version is asked, the environment made, and packages installed into it.
    make = '[ "$2" != venv ] || { mkdir -p "$3/bin" && ln -s /bin/false "$3/bin/python"; }'
    write_program(tmp_path / "python3", make)

    def run(**env):
        path = f"{tmp_path}:{os.environ['PATH']}"
        return run_program(ROOT / "scripts" / "test_cuda.sh", env={"PATH": path, **env})

    return run


@pytest.mark.parametrize(
    ("name", "value", "tells"),
    [
        ("SGLANG", "banana", " must be one of 0.5.17 "),
        ("SGLANG", "../patches/shared", " must be one of 0.5.17 "),
        ("CUDA_VENV", "/proc/nope", "=/proc/nope "),
        ("CUDA_VENV", "/dev/null", "=/dev/null: "),
    ],
)
def test_wrong_input_is_refused_in_a_line(run, name, value, tells):
    assert read_line(run(**{name: value})).startswith(f"test-cuda: {name}{tells}")


def test_a_folder_of_others_is_left_as_it_is(run, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "data").write_text("kept")
    done = run(CUDA_VENV=str(folder))
    assert done.returncode == 1
    assert f"CUDA_VENV={folder}: " in done.stderr
    assert [path.name for path in folder.iterdir()] == ["data"]


def test_what_was_interrupted_is_made_anew(run, tmp_path):
    folder = tmp_path / "new"
    for _ in range(2):
        assert run(CUDA_VENV=str(folder)).returncode == 1  # no pip
        assert {path.name for path in folder.iterdir()} == {".begun", "bin"}
        assert not (folder / "bin" / "left").exists()
        (folder / "bin" / "left").touch()
