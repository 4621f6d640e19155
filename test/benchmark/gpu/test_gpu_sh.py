"""The one command: without a GPU it says so and prints no number; with one it runs, tabulates and brings back."""

import os
import tarfile

import pytest

from programs import copy_files, read_line, run_program, write_program

# Stands for Python in the environment: notes what it runs; fails where $FAIL is among its arguments.
PYTHON = """#!/bin/sh
echo "$*" >>ran
echo "$CUDA_HOME" >cuda_home
[ "$1" = -c ] && exit 0
case " $* " in *" $FAIL "*) exit 3 ;; esac
exit 0
"""


@pytest.fixture
def checkout(tmp_path):
    """The script, with stand-ins for Python, for the environment's script and for a driver with one GPU."""
    copy_files(tmp_path, "scripts/gpu.sh", "scripts/gpu/toolkit.sh")
    write_program(tmp_path / "scripts" / "make_venv.sh", "")
    write_program(tmp_path / "bin" / "nvidia-smi", "echo NVIDIA H200")
    for name in ("venv/bin/python", "bin/python3"):
        write_program(tmp_path / name, PYTHON)
    return tmp_path


def run(checkout, *args, **env):
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    defaults = {"FAIL": "none", "VENV": "venv", "PATH": path, "RESULTS": "results", "SGLANG_XSHARE_DEVICE": ""}
    return run_program(checkout / "scripts" / "gpu.sh", *args, env={"OUT": None, "CUDA_HOME": None, **defaults, **env})


def calls(checkout):
    """What Python was called with, from the checkout."""
    lines = (checkout / "ran").read_text().replace(f"{checkout}/", "").splitlines()
    return [line.removeprefix("-m ") for line in lines]


@pytest.mark.parametrize("experiment", ["all", "layer"])
@pytest.mark.parametrize("hidden", [False, True])
def test_without_a_gpu_it_says_so_in_one_line_and_exits_with_2(checkout, experiment, hidden):
    if not hidden:
        (checkout / "bin" / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    refused = run(checkout, experiment, **({"SGLANG_XSHARE_DEVICE": "cpu"} if hidden else {}))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "gpu: no NVIDIA GPU answers here; nothing was measured\n"
    assert not (checkout / "ran").exists()
    assert not (checkout / "results").exists()


WRONG = [(["lyaer"], "EXPERIMENT", "lyaer"), (["all", "a"], "PARTS", "a")]
WRONG += [([], name, value) for name, value in (("LIMIT", "soon"), ("LIMIT", "0"), ("QUICK", "yes"))]


@pytest.mark.parametrize(("args", "name", "value"), WRONG)
def test_a_wrong_setting_is_refused_in_one_line(checkout, args, name, value):
    line = read_line(run(checkout, *args, **({} if args else {name: value})))
    assert line.startswith(f"gpu: {name} must ")
    assert line.endswith(f" (got {value})")


@pytest.mark.parametrize(("fail", "status"), [("none", 0), ("run", 3)])
def test_all_patches_then_runs_then_tabulates_whatever_fails(checkout, fail, status):
    assert run(checkout, FAIL=fail).returncode == status
    assert calls(checkout) == [
        "pip download --quiet --no-deps --retries 0 --timeout 10 --dest build/gpu/probe wheel",  # is there an index?
        "sglang_xshare patch apply",
        "benchmark.gpu run --out results",
        "benchmark.gpu table --out results",
    ]


def test_without_an_archive_and_a_package_index_it_ends_at_once(checkout):
    line = read_line(run(checkout, FAIL="download"))
    assert line.startswith("gpu: no package index answers and .gpu/site.tar.xz is missing; ")
    assert not any("benchmark.gpu" in call for call in calls(checkout))


JIT = "gpu: .gpu/jit.tar.xz is missing; the first gpt-oss server builds two kernels, in about a minute\n"


def test_the_archive_is_unpacked_once_and_used(checkout):
    (checkout / ".gpu").mkdir()
    (checkout / "module.py").touch()
    for name in ("site", "extras", "tvmcache"):
        with tarfile.open(checkout / ".gpu" / f"{name}.tar.xz", "w:xz") as archive:
            archive.add(checkout / "module.py", f"{name}/module.py")
    for _ in range(2):
        assert JIT in run(checkout, "layer").stdout
    for name in ("site/site", "site/extras", "tvmcache"):
        assert (checkout / "build" / "gpu" / name / "module.py").exists()
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
