"""The one command: without a GPU it says so and prints no number; with one it runs every experiment, whatever fails."""

import os
import shutil
import subprocess
import tarfile

import pytest

from benchmark.common.paths import ROOT

# Stands for Python in the environment: notes what it runs, fails the experiment in $FAIL, hangs in that in $HANG.
PYTHON = """#!/bin/sh
echo "$*" >>ran
[ "$1" = -c ] && exit 0
[ "$3" = "$HANG" ] && exec sleep 60
[ "$3" != "$FAIL" ]
"""


@pytest.fixture
def checkout(tmp_path):
    """The script, with stand-ins for Python, for the environment's script and for a driver with one GPU."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "gpu.sh", tmp_path / "scripts")
    programs = {
        "scripts/make_venv.sh": "#!/bin/sh\n",
        "venv/bin/python": PYTHON,
        "bin/python3": PYTHON,
        "bin/nvidia-smi": "#!/bin/sh\necho NVIDIA H200\n",
    }
    for name, text in programs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def run(checkout, *args, gpu=True, **env):
    path = f"{checkout / 'bin'}:{os.environ['PATH']}" if gpu else os.environ["PATH"]
    defaults = {"FAIL": "none", "HANG": "none", "VENV": "venv", "PATH": path, "RESULTS": "results"}
    script = str(checkout / "scripts" / "gpu.sh")
    environment = {name: value for name, value in os.environ.items() if name != "OUT"} | defaults | env
    return subprocess.run([script, *args], env=environment, capture_output=True, text=True)


def experiments(checkout):
    """What `python -m benchmark.gpu` was called with, without the folder."""
    lines = (checkout / "ran").read_text().splitlines()
    calls = [line.removeprefix("-m benchmark.gpu ") for line in lines if line.startswith("-m benchmark.gpu ")]
    return [call.partition(" --out ")[0] for call in calls]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a GPU")
@pytest.mark.parametrize("experiment", ["all", "layer"])
def test_without_a_gpu_it_says_so_in_one_line_and_exits_with_2(checkout, experiment):
    refused = run(checkout, experiment, gpu=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "gpu: no NVIDIA GPU answers here; nothing was measured\n"
    assert not (checkout / "ran").exists()
    assert not (checkout / "results").exists()


def test_an_unknown_experiment_is_refused(checkout):
    refused = run(checkout, "lyaer")
    assert refused.returncode == 1
    assert refused.stderr == "gpu: experiment 'lyaer': allowed is selection layer server eagle3 replay tune or all\n"


def test_all_patches_then_checks_then_runs_every_experiment(checkout):
    assert run(checkout).returncode == 0
    assert (checkout / "ran").read_text().splitlines()[:2] == [
        "-m sglang_xshare patch apply",
        "-m benchmark.gpu.preflight",
    ]
    models = ["qwen3-30b-a3b", "gpt-oss-120b", "gpt-oss-20b", "qwen3-30b-a3b-aligned"]
    served = [f"server {model}" for model in models]
    assert experiments(checkout) == ["selection", "layer", *served, "eagle3", "replay", "tune", "table"]


def test_one_experiment_alone_and_its_models(checkout):
    assert run(checkout, "server", "gpt-oss-20b").returncode == 0
    assert experiments(checkout) == ["server gpt-oss-20b", "table"]


def test_a_policy_reaches_the_experiment_that_tunes_for_it(checkout):
    assert run(checkout, "tune", "gpt-oss-20b", POLICY="oea:k0=3").returncode == 0
    assert "-m benchmark.gpu tune gpt-oss-20b --out results --policy oea:k0=3" in (checkout / "ran").read_text()
    assert run(checkout, "layer", POLICY="oea:k0=3").returncode == 0
    assert "layer --out results\n" in (checkout / "ran").read_text().replace(str(checkout) + "/", "")


def test_a_failed_experiment_does_not_stop_the_others(checkout):
    failed = run(checkout, FAIL="layer")
    assert failed.returncode == 1
    assert experiments(checkout)[-4:] == ["eagle3", "replay", "tune", "table"]
    assert failed.stderr.endswith("gpu: not finished: layer\n")


def test_an_experiment_is_stopped_at_its_limit_and_the_table_still_comes(checkout):
    stopped = run(checkout, "layer", HANG="layer", LIMIT="2")
    assert stopped.returncode == 1
    assert "gpu: layer: stopped at its limit; what it measured is kept" in stopped.stderr
    assert experiments(checkout) == ["layer", "table"]


def test_kernels_that_do_not_run_end_it(checkout):
    (checkout / "venv/bin/python").write_text(PYTHON + '[ "$2" != benchmark.gpu.preflight ]\n')
    assert run(checkout).returncode == 1
    assert experiments(checkout) == []


def test_the_archive_is_unpacked_once_and_used(checkout):
    (checkout / ".gpu").mkdir()
    (checkout / "module.py").touch()
    for name in ("site", "extras", "tvmcache"):
        with tarfile.open(checkout / ".gpu" / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(checkout / "module.py", f"{name}/module.py")
    for _ in range(2):
        assert run(checkout, "layer").returncode == 0
    site = checkout / "build" / "gpu" / "site"
    assert (site / "site" / "module.py").exists()
    assert (site / "extras" / "module.py").exists()
    assert (checkout / "build" / "gpu" / "tvmcache" / "module.py").exists()
    lines = (checkout / "ran").read_text().splitlines()
    assert sum("compileall" in line for line in lines) == 1
    assert lines.count(f"-m sglang_xshare patch apply --target {site}") == 2


def test_results_that_go_elsewhere_continue_those_of_the_checkout(checkout):
    first = run(checkout, "layer", RESULTS="")
    (today,) = (checkout / "benchmark" / "results").iterdir()
    assert today.name.endswith("-nvidia-h200"), first.stderr
    (today / "layer.json").write_text("{}")
    assert run(checkout, "layer", RESULTS="", OUT=str(checkout / "out")).returncode == 0
    assert (checkout / "out" / "layer.json").read_text() == "{}"
    assert f"--out {checkout}/out" in (checkout / "ran").read_text().splitlines()[-1]
