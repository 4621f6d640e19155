"""The script of `make venv`, with a stand-in for Python: made once, anew when half made or when something changed."""

import os
import shutil
import subprocess

import pytest

from benchmark.common.paths import ROOT
from programs import write_program

# Stands for python3: `-m venv DIR` makes DIR's bin, its python the script beside it.
PYTHON3 = """#!/bin/sh
case "$*" in
--version) echo "Python 3.11.7" ;;
-c*) exit 0 ;;
"-m venv "*) mkdir -p "$3/bin"; cp "$(dirname "$0")/venv-python" "$3/bin/python" ;;
*) echo "unexpected: $*"; exit 2 ;;
esac
"""
# Notes its arguments in DIR/calls; a pip call named in $FAIL fails.
VENV_PYTHON = """#!/bin/sh
echo "$@" >>"$(dirname "$0")/../calls"
case "$*" in *"${FAIL:-nothing}"*) echo no such package; exit 1 ;; esac
"""


@pytest.fixture
def checkout(tmp_path):
    """The files the script reads, and its stand-ins on the path."""
    for name in ("scripts", "python", "sgl-kernel", "bin"):
        (tmp_path / name).mkdir()
    for path in [*(ROOT / "scripts").glob("requirements-*.txt"), ROOT / "scripts" / "make_venv.sh"]:
        shutil.copy(path, tmp_path / "scripts")
    for package in ("python", "sgl-kernel"):
        shutil.copy(ROOT / package / "pyproject.toml", tmp_path / package)
    write_program(tmp_path / "bin" / "python3", PYTHON3)
    write_program(tmp_path / "bin" / "venv-python", VENV_PYTHON)
    write_program(tmp_path / "bin" / "nvidia-smi", "exit 9")
    return tmp_path


def make_venv(checkout, *args, **env):
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "VENV": ".venv", "SGLANG_XSHARE_DEVICE": "", **env, "PATH": path}
    command = [str(checkout / "scripts" / "make_venv.sh"), *args]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def refusal(checkout, *args, **env):
    """Return the one line of a refusal; nothing was printed, or changed in the folder that the line names."""

    def read():
        return {path: path.read_bytes() for path in (checkout / env["VENV"]).rglob("*") if path.is_file()}

    before = read()
    refused = make_venv(checkout, *args, **env)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (1, "", 1)
    assert read() == before
    return refused.stderr.strip()


def calls(checkout):
    return (checkout / ".venv" / "calls").read_text()


def test_made_once_then_left_alone(checkout):
    first = make_venv(checkout)
    assert first.returncode == 0, first.stderr
    assert "sgl_kernel for the CPU" in first.stdout
    assert "install --disable-pip-version-check --no-input --no-deps sglang==" in calls(checkout)
    made = calls(checkout)
    assert make_venv(checkout).stdout == ""
    assert calls(checkout) == made
    with (checkout / "scripts" / "requirements-dev.txt").open("a") as file:
        file.write("another\n")
    assert "making .venv" in make_venv(checkout).stdout, "other requirements make it anew"


def test_a_machine_with_a_gpu_gets_the_whole_release(checkout):
    write_program(checkout / "bin" / "nvidia-smi", "exit 0")
    assert make_venv(checkout).returncode == 0
    assert "--no-deps" not in calls(checkout)
    assert "sgl-kernel" not in calls(checkout)


def test_a_failed_step_is_told_and_the_next_run_starts_anew(checkout):
    failed = make_venv(checkout, FAIL="requirements-dev")
    assert failed.returncode == 1
    assert "no such package" in failed.stderr
    assert "make_venv: 'tools of tests and benchmarks' failed" in failed.stderr
    (checkout / ".venv" / "leftover").touch()
    assert make_venv(checkout).returncode == 0
    assert not (checkout / ".venv" / "leftover").exists()
    assert make_venv(checkout, VENV="half", FAIL="-e python").returncode == 1
    assert make_venv(checkout, "--remove", VENV="half").returncode == 0, "a half made one is ours"
    assert not (checkout / "half").exists()


@pytest.mark.parametrize(
    ("args", "name"), [((), "notes.txt"), (("--remove",), "pyvenv.cfg"), (("--remove",), ".complete")]
)
def test_a_folder_that_is_not_ours_is_refused(checkout, args, name, tmp_path_factory):
    """A user's files, a virtual environment of theirs; `.complete` was our mark in `.venv` alone."""
    (checkout / "mine").mkdir()
    (checkout / "mine" / name).write_text("mine\n")
    line = refusal(checkout, *args, VENV="mine")
    assert line.startswith("make_venv: mine is there, and this project did not make it")
    other = tmp_path_factory.mktemp("other") / "checkout"
    shutil.copytree(checkout, other)
    assert make_venv(other).returncode == 0
    line = refusal(checkout, *args, VENV=str(other / ".venv"))
    assert line.startswith(f"make_venv: {other}/.venv was made by the checkout in {other}; name a new folder")
    line = refusal(checkout, SGLANG_XSHARE_DEVICE="tpu", VENV=".venv")
    assert line.startswith("make_venv: SGLANG_XSHARE_DEVICE must be cpu")


@pytest.mark.parametrize("target", ["bench", "eval"])
def test_a_benchmark_in_an_environment_of_ones_own_makes_no_other(target):
    """On the command line alone: PYTHON may stand in anybody's environment."""
    of_an_outer_make = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")  # `make test` runs this test
    env = {name: value for name, value in os.environ.items() if name not in of_an_outer_make} | {"PYTHON": "other"}

    def plan(*words):
        command = ["make", "-n", target, *words]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)

    assert "make_venv" in plan().stdout
    own = plan("PYTHON=python")
    assert own.returncode == 0
    assert own.stdout.splitlines()[-1].startswith("python -m benchmark.")
    assert ".venv" not in own.stdout
    assert "make_venv" not in own.stdout
