"""The bundle for a GPU machine that can install nothing: with the checkout it stays below what may travel."""

import os
import shutil
import subprocess
import tarfile

import pytest

from benchmark.common.paths import ROOT
from programs import write_program

# Stands for pip, which has nothing to install, and for the module that writes the commit.
PYTHON = """#!/bin/sh
case "$*" in *carry*) echo 0123456789ab >.gpu/commit ;; esac
"""

# Stands for the environment's: of the two kernels it builds one, says why not the other, and ends with a status.
BUILDER = """#!/bin/sh
for one; do last=$one; done
case "$*" in *build_jit*) mkdir "$last"; : >"$last/rope.so"; echo no tinygemm2 >&2; exit {status} ;; esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A git repository with the script, and an archive of SGLang of 1 MiB."""
    (tmp_path / "scripts" / "gpu").mkdir(parents=True)
    (tmp_path / "from").mkdir()
    for name in ("gpu_bundle.sh", "gpu/toolkit.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    (tmp_path / "scripts" / "gpu" / "extras.txt").write_text("one\n")
    write_program(tmp_path / "bin" / "python3", PYTHON)
    (tmp_path / ".gitignore").write_text(".gpu/\nfrom/\nbin/\nbuild/\n")
    make_file(tmp_path / "from" / "site.tar.xz", 1)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def make_file(path, mib):
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.truncate(mib << 20)


def bundle(checkout, **more):
    kept = {name: value for name, value in os.environ.items() if name not in {"VENV", "CUDA_HOME"}}
    env = kept | {"PATH": f"{checkout / 'bin'}:{os.environ['PATH']}", "FROM": "from"} | more
    return subprocess.run([str(checkout / "scripts" / "gpu_bundle.sh")], env=env, capture_output=True, text=True)


def test_it_holds_the_archives_and_the_commit(checkout):
    make_file(checkout / "build" / "ignored", 100)
    done = bundle(checkout)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (checkout / ".gpu").iterdir()) == ["commit", "extras.tar.xz", "site.tar.xz"]
    assert done.stderr.startswith("gpu-bundle: no jit.tar.xz")


@pytest.mark.parametrize("status", [0, 1])
def test_kernels_that_are_built_here_travel_together_or_not_at_all(checkout, status):
    for name in ("site", "fi_distinfo"):
        with tarfile.open(checkout / "from" / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(checkout / "scripts", "sglang" if name == "site" else "flashinfer")
    toolkit = checkout / "build" / "cuda"
    for path, text in (
        (checkout / ".venv" / "bin" / "python", BUILDER.format(status=status)),
        (toolkit / "bin" / "nvcc", ""),
        (toolkit / "include" / "cuda_runtime.h", ""),
    ):
        write_program(path, text)
    done = bundle(checkout, CUDA_HOME=str(toolkit))
    assert done.returncode == 0, done.stderr
    built = [path.name for path in (checkout / ".gpu").glob("jit*")]
    if status:
        assert built == []
        assert done.stderr.startswith("no tinygemm2\ngpu-bundle: no jit.tar.xz")
    else:
        assert (built, done.stderr) == (["jit.tar.xz"], "")
        with tarfile.open(checkout / ".gpu" / "jit.tar.xz") as archive:
            assert "./rope.so" in archive.getnames()


@pytest.mark.parametrize("tracked", [False, True])
def test_the_checkout_counts(checkout, tracked):
    make_file(checkout / "docs" / "film", 64)
    make_file(checkout / "deleted", 1)
    subprocess.run(["git", "add", "docs" if tracked else "scripts", "deleted"], cwd=checkout, check=True)
    (checkout / "deleted").unlink()
    done = bundle(checkout)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "gpu-bundle: checkout and .gpu/ have 66 MiB; at most 64 MiB may travel"
