"""The environment script, with a stand-in for Python: made once, made anew when half made or when something changed."""

import os
import shutil
import subprocess

import pytest

from benchmark.common.paths import ROOT

# Stands for python3: `-m venv --clear DIR` makes DIR anew, its python the script beside it.
PYTHON3 = """#!/bin/sh
case "$*" in
--version) echo "Python 3.11.7" ;;
-c*) exit 0 ;;
"-m venv --clear "*) rm -rf "$4"; mkdir -p "$4/bin"; cp "$(dirname "$0")/venv-python" "$4/bin/python" ;;
*) echo "unexpected: $*"; exit 2 ;;
esac
"""
# Notes its arguments in DIR/calls; a pip call named in $FAIL fails.
VENV_PYTHON = """#!/bin/sh
echo "$@" >>"$(dirname "$0")/../calls"
case "$*" in *"${FAIL:-nothing}"*) echo no such package; exit 1 ;; esac
"""
NO_GPU = "#!/bin/sh\nexit 9\n"
GPU = "#!/bin/sh\nexit 0\n"


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
    write_program(tmp_path / "bin" / "nvidia-smi", NO_GPU)
    return tmp_path


def write_program(path, text):
    path.write_text(text)
    path.chmod(0o755)


def make_venv(checkout, *args, **env):
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    command = [str(checkout / "scripts" / "make_venv.sh"), *args]
    return subprocess.run(
        command, env={**os.environ, "VENV": ".venv", **env, "PATH": path}, capture_output=True, text=True
    )


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


def test_a_machine_with_a_gpu_gets_the_whole_release(checkout):
    write_program(checkout / "bin" / "nvidia-smi", GPU)
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


def test_other_requirements_make_it_anew(checkout):
    make_venv(checkout)
    with (checkout / "scripts" / "requirements-dev.txt").open("a") as file:
        file.write("another\n")
    assert "making .venv" in make_venv(checkout).stdout


def test_an_argument_is_refused(checkout):
    refused = make_venv(checkout, "elsewhere")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "make_venv: unexpected argument 'elsewhere'; the folder is set by VENV=DIR\n"
