"""`make test-cuda` refuses in one line before it downloads anything, and removes nothing that it has not made."""

import os
import subprocess

import pytest

from benchmark.common.paths import ROOT
from programs import write_program


@pytest.fixture
def run(tmp_path):
    """A function (**environment) that runs the script with compilers that do nothing and a pip that fails."""
    for name in ("g++", "nvcc"):
        write_program(tmp_path / name, "#!/bin/sh\n")
    # Python's version is asked, the environment made, and packages installed into it.
    write_program(
        tmp_path / "python3",
        '#!/bin/sh\n[ "$2" != venv ] || { mkdir -p "$3/bin" && ln -s /bin/false "$3/bin/python"; }\n',
    )

    def run(**environment):
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **environment}
        return subprocess.run(ROOT / "scripts" / "test_cuda.sh", env=env, capture_output=True, text=True)

    return run


def test_a_folder_of_others_is_left_and_what_was_interrupted_is_made_anew(run, tmp_path):
    mine, new = tmp_path / "mine", tmp_path / "new"
    mine.mkdir()
    (mine / "data").write_text("kept")
    assert run(SGLANG="banana").stderr.startswith("test-cuda: SGLANG must be one of 0.5.17 ")
    assert f"CUDA_VENV={mine}: " in run(CUDA_VENV=str(mine)).stderr
    assert [path.name for path in mine.iterdir()] == ["data"]
    for _ in range(2):
        assert run(CUDA_VENV=str(new)).returncode == 1  # no pip
        assert {path.name for path in new.iterdir()} == {".begun", "bin"}
        assert not (new / "bin" / "left").exists()
        (new / "bin" / "left").touch()
