"""The script of `make venv`, with a stand-in for Python: made once, anew when half made or when something changed."""

import os
import shutil

import pytest

from benchmark.common.paths import ROOT
from programs import OF_AN_OUTER_MAKE, copy_files, read_line, run_program, write_program

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
    requirements = [f"scripts/{path.name}" for path in (ROOT / "scripts").glob("requirements-*.txt")]
    copy_files(tmp_path, *requirements, "scripts/make_venv.sh", "python/pyproject.toml", "sgl-kernel/pyproject.toml")
    for name, text in {"python3": PYTHON3, "venv-python": VENV_PYTHON, "nvidia-smi": "exit 9"}.items():
        write_program(tmp_path / "bin" / name, text)
    return tmp_path


def make_venv(checkout, *args, **env):
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    env = {"VENV": ".venv", "SGLANG_XSHARE_DEVICE": "", **env, "PATH": path}
    return run_program(checkout / "scripts" / "make_venv.sh", *args, env=env)


def refusal(checkout, *args, **env):
    """Return the one line of a refusal; nothing was printed, or changed in the folder that the line names."""

    def read():
        return {path: path.read_bytes() for path in (checkout / env["VENV"]).rglob("*") if path.is_file()}

    before = read()
    line = read_line(make_venv(checkout, *args, **env))
    assert read() == before
    return line


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

    def plan(*words):
        return run_program("make", "-n", target, *words, cwd=ROOT, env={**OF_AN_OUTER_MAKE, "PYTHON": "other"})

    assert "make_venv" in plan().stdout
    own = plan("PYTHON=python")
    assert own.returncode == 0
    assert own.stdout.splitlines()[-1].startswith("python -m benchmark.")
    assert ".venv" not in own.stdout
    assert "make_venv" not in own.stdout
