"""The script that makes the archives for a GPU machine: it explains itself, and refuses before it downloads."""

import pytest

from benchmark.common.paths import ROOT
from programs import read_line, run_program, write_program


def run(folder, *args, **env):
    return run_program(ROOT / "scripts" / "gpu" / "make_site.sh", *args, env=env, cwd=folder)


def test_help_explains_what_it_makes_and_needs(tmp_path):
    found = run(tmp_path, "--help")
    assert (found.returncode, found.stderr) == (0, "")
    for word in ("make_site.sh DIR", "make gpu-bundle FROM=DIR", "jit.tar.xz", "Python 3.12", "unzip", "1.5 GB"):
        assert word in found.stdout
    assert "set -euo" not in found.stdout
    assert "#" not in found.stdout


@pytest.mark.parametrize("args", ["", "one two", "--out"])
def test_another_argument_is_refused_in_one_line(args, tmp_path):
    line = f"make_site: must have one argument, a folder for the archives (got {args or 'none'}); --help explains"
    assert read_line(run(tmp_path, *args.split())) == line


@pytest.mark.parametrize(("version", "got"), [("3.11", "{python}, which is 3.11"), (None, "{python}")])
def test_another_python_is_refused_in_one_line(version, got, tmp_path):
    python = tmp_path / "python"
    if version is not None:
        write_program(python, f"#!/bin/sh\necho {version}\n")
    line = f"make_site: PYTHON must be a Python 3.12 (got {got.format(python=python)})"
    assert read_line(run(tmp_path, "to", PYTHON=str(python))) == line
    assert not (tmp_path / "to").exists()


def test_a_python_without_torch_is_refused_where_kernels_would_be_built(tmp_path):
    """The folder is the caller's, whatever folder the script works in."""
    for name in ("python", "cuda/bin/nvcc"):
        write_program(tmp_path / name, '#!/bin/sh\ncase "$*" in *torch*) exit 1 ;; esac\necho 3.12\n')
    (tmp_path / "cuda" / "include").mkdir()
    (tmp_path / "cuda" / "include" / "cuda_runtime.h").touch()
    line = read_line(run(tmp_path, "to", PYTHON=str(tmp_path / "python"), CUDA_HOME=str(tmp_path / "cuda")))
    assert line.startswith("make_site: PYTHON must have torch for CUDA, ")
    assert list((tmp_path / "to").iterdir()) == []
