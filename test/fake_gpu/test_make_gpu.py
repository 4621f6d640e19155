"""`make gpu` on the GPU that is not there: its checks, and its experiments as far as their tables.

Not here: `preflight upstream`, experiments `selection ids` and `caches`, and the tests of `selection` and `replay`,
which compare what kernels compute (of ours `preflight selection` does, by their PTX), and what `tune` finds:
it searches for times.
"""

import os
import subprocess
import sys

import pytest

from benchmark.common.paths import ROOT

CHECKS = ("patch", "nvcc", "compilation-32", "compilation-128", "imports", "eagle3")
WALKS = {
    "levers": (),
    "layer": ("qwen3-30b-a3b",),
    "selection": ("shapes",),
    "server": ("gpt-oss-20b",),
    "replay": ("server",),
    "routing": ("128",),
    "eagle3": (),
}


def run(*command, **environment):
    """What a module printed. Raises CalledProcessError where it fails."""
    path = os.pathsep.join(str(ROOT / folder) for folder in ("python", "", "test"))
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, "-m", *command], env=env, cwd=ROOT, check=True, stdout=subprocess.PIPE
    ).stdout


def test_the_checks_pass():
    run("benchmark.gpu.preflight", *CHECKS)


def test_a_captured_selection_is_the_references():
    run("benchmark.gpu.preflight", "selection", FAKE_GPU_VALUES="1")


@pytest.mark.parametrize("gib", ["78", "139"])
@pytest.mark.parametrize("experiment", WALKS)
def test_an_experiment_comes_to_its_table(experiment, gib, tmp_path):
    run("fake_gpu.walk", experiment, *WALKS[experiment], "--out", str(tmp_path), FAKE_GPU_GIB=gib)
    assert experiment.encode() in run("fake_gpu.walk", "table", "--out", str(tmp_path))


def test_a_run_of_few_minutes_leaves_the_rest_for_the_next(tmp_path):
    first = run("fake_gpu.walk", "run", "--limit", "300", "--out", str(tmp_path)).decode()
    assert "gpu: levers, at most" in first
    assert "gpu: the same command continues with: server" in first
    second = run("fake_gpu.walk", "run", "--limit", "150", "--out", str(tmp_path)).decode()
    assert "gpu: levers" not in second
    assert "gpu: check " not in second
    assert "gpu: server " in second
