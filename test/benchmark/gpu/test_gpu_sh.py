"""The one command on a GPU: it runs, tabulates and brings back. Without a GPU, `test/docs` runs it."""

import os
import shutil
import subprocess
import tarfile

import pytest

from benchmark.common.paths import ROOT
from programs import write_program

# Stands for Python in the environment: notes what it runs; fails where $FAIL is among its arguments.
PYTHON = """#!/bin/sh
echo "$*" >>ran
[ "$1" = -c ] && exit 0
case " $* " in *" $FAIL "*) exit 3 ;; esac
exit 0
"""


@pytest.fixture
def checkout(tmp_path):
    """The script, with stand-ins for Python, for the environment's script and for a driver with one GPU."""
    (tmp_path / "scripts" / "gpu").mkdir(parents=True)
    for name in ("gpu.sh", "gpu/toolkit.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    write_program(tmp_path / "scripts" / "make_venv.sh", "exit 0")
    write_program(tmp_path / "bin" / "nvidia-smi", "echo NVIDIA H200")
    for name in ("venv/bin/python", "bin/python3"):
        write_program(tmp_path / name, PYTHON)
    return tmp_path


def run(checkout, *args, **env):
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    defaults = {"FAIL": "none", "VENV": "venv", "PATH": path, "RESULTS": "results", "SGLANG_XSHARE_DEVICE": ""}
    outer = {name: value for name, value in os.environ.items() if name not in ("OUT", "CUDA_HOME")}
    script = str(checkout / "scripts" / "gpu.sh")
    return subprocess.run([script, *args], env=outer | defaults | env, capture_output=True, text=True)


def calls(checkout):
    """What Python was called with, from the checkout."""
    lines = (checkout / "ran").read_text().replace(f"{checkout}/", "").splitlines()
    return [line.removeprefix("-m ") for line in lines]


@pytest.mark.parametrize(("fail", "status"), [("none", 0), ("run", 3)])
def test_all_patches_then_runs_then_tabulates_whatever_fails(checkout, fail, status):
    assert run(checkout, FAIL=fail).returncode == status
    assert calls(checkout)[1:] == [
        "sglang_xshare patch apply",
        "benchmark.gpu run --out results",
        "benchmark.gpu table --out results",
    ]


def test_the_archive_is_unpacked_once_and_used(checkout):
    (checkout / ".gpu").mkdir()
    (checkout / "module.py").touch()
    for name in ("site", "extras", "tvmcache"):
        with tarfile.open(checkout / ".gpu" / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(checkout / "module.py", f"{name}/module.py")
    for _ in range(2):
        run(checkout, "layer")
    build = checkout / "build" / "gpu"
    assert all((build / name / "module.py").exists() for name in ("site/site", "site/extras", "tvmcache"))
    assert sum("compileall" in call for call in calls(checkout)) == 1
    assert calls(checkout).count("sglang_xshare patch apply --target build/gpu/site") == 2


def test_what_goes_elsewhere_continues_the_results_of_the_checkout_and_is_brought_back(checkout):
    first = run(checkout, "layer", RESULTS="")
    (today,) = (checkout / "benchmark" / "results").iterdir()
    assert today.name.endswith("-nvidia-h200"), first.stderr
    (today / "layer.json").write_text("{}")
    assert run(checkout, QUICK="1", RESULTS="", OUT=str(checkout / "out")).returncode == 0
    kept = checkout / "build" / "gpu" / "results"
    assert (kept / "layer.json").read_text() == "{}"
    assert calls(checkout)[-1] == "benchmark.gpu table --out build/gpu/results"
    with tarfile.open(checkout / "out" / "results.tar.xz") as archive:
        assert "./layer.json" in archive.getnames()
