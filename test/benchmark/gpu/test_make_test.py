"""`make test` beside a GPU: the kernels on it, everything else as on a machine without one."""

import os
import subprocess

import pytest

from benchmark.common.paths import ROOT
from benchmark.gpu import replay, selection
from programs import write_program

NEEDS_GPU = "@pytest.mark.skipif(not HAS_GPU"


def dry_run(tmp_path, verb, status, device=""):
    """What make would run where `nvidia-smi` ends with `status`."""
    write_program(tmp_path / "nvidia-smi", f"exit {status}")
    kept = {
        name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "VENV"}
    }
    env = kept | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SGLANG_XSHARE_DEVICE": device}
    done = subprocess.run(["make", "--dry-run", verb], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.strip() for line in done.stdout.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize(("verb", "runs"), [("test", "pytest -m"), ("test-long", "scripts/test_long.sh")])
def test_with_a_gpu_all_but_the_kernels_runs_without_it(tmp_path, verb, runs):
    lines = dry_run(tmp_path, verb, 0)
    inner = dry_run(tmp_path, verb, 0, "cpu")
    assert f"make {verb} SGLANG_XSHARE_DEVICE=cpu VENV=build/venv-cpu" in lines
    assert [line.replace("build/venv-cpu", ".venv") for line in lines if runs in line] == [
        line for line in inner if runs in line
    ]
    assert inner == dry_run(tmp_path, verb, 9)


def test_what_needs_a_gpu_or_compiles_another_kernel_is_among_the_kernels_tests():
    """Exact rows and residents are constants of a compilation: no other test compiles them."""
    needing = {file for file in (ROOT / "test").rglob("test_*.py") if f"\n{NEEDS_GPU}" in file.read_text()}
    needing.add(ROOT / "test" / "selection" / "test_residents.py")
    assert needing <= {ROOT / path for path in (*selection.TESTS, replay.TESTS)}


def test_the_kernels_tests_run_on_the_gpu(tmp_path):
    (line,) = [line for line in dry_run(tmp_path, "test", 0) if "not upstream" in line]
    assert line.startswith(".venv/bin/python -m pytest")
    assert [word for word in line.split() if word.startswith("test/")] == [*selection.TESTS, replay.TESTS]
