"""The run's tasks: their order, their turns, what a failure stops and what it does not; each is a real process."""

import sys

import pytest

from benchmark.common.record import read_record
from benchmark.gpu import process
from benchmark.gpu import run as module
from benchmark.gpu.process import Process
from benchmark.gpu.run import Task, rows, run
from programs import write_program

A, B, C = Task("layer", ("a",), 60.0), Task("server", ("b",), 100.0, ("nvcc",)), Task("tune", (), 10.0)
MADE_UP = """
import os, sys, time
from pathlib import Path
from benchmark.common.record import Record
name, (out, here) = sys.argv[1], (Path(sys.argv[sys.argv.index("--out") + 1]), Path(__file__).parent)
def note(what):
    with (here / "ran").open("a") as file:
        print(what, file=file)

if gate := os.environ.get("SGLANG_XSHARE_GATE"):
    time.sleep(1.5)
    note(f"{name}-ready")
    Path(gate).touch()
    while Path(gate).exists():
        time.sleep(0.01)
note(name)
Record(out, name, []).add(f"point {time.time()}", us=1.0)
if (here / f"{name}-hangs").exists():
    time.sleep(60)
if (here / f"{name}-fails").exists():
    sys.exit("gpu: it broke\\nat length")
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Call it with a limit for three tasks, one of which needs nvcc: (whether none failed, what ran)."""
    for name in ("bin/nvcc", "include/cuda_runtime.h", "c++"):
        write_program(tmp_path / name, "exit 0")
    (tmp_path / "made_up.py").write_text(MADE_UP)
    path = f"{tmp_path}:{module.ROOT}:{module.ROOT / 'python'}"
    for name, value in {"CUDA_HOME": tmp_path, "CXX": tmp_path / "c++", "PYTHONPATH": path}.items():
        monkeypatch.setenv(name, str(value))
    for name, value in {"MODULE": "made_up", "ENDING": 0.0, "CHECKED": tmp_path / "checked"}.items():
        monkeypatch.setattr(module, name, value)

    def run_all(limit=None, tasks=(A, B, C)):
        (tmp_path / "ran").write_text("")
        well = run(tmp_path / "results", ["made up"], tasks, limit, None)
        return well, (tmp_path / "ran").read_text().split()

    return run_all


def test_every_task_has_its_turn_and_is_not_run_again(call, tmp_path):
    assert call() == (True, ["layer", "server", "tune"])
    assert call() == (True, [])
    (tmp_path / "results" / "layer.json").unlink()
    assert call() == (True, ["layer"]), "whoever deletes a record wants it measured anew"


def test_a_failed_task_or_check_stops_no_other_and_is_tried_last(call, tmp_path, capsys):
    (tmp_path / "layer-fails").touch()
    write_program(tmp_path / "bin" / "nvcc", "exit 1")
    assert call() == (False, ["layer", "tune"])
    assert capsys.readouterr().out.splitlines()[-2:] == ["gpu: layer a: it broke", "gpu: server b: needs nvcc"]
    *_, row = rows(read_record(tmp_path / "results" / "run.json")["points"])
    assert (row.what, row.measured, row.verdict) == ("layer a", "it broke", "miss")
    (tmp_path / "layer-fails").unlink()
    write_program(tmp_path / "bin" / "nvcc", "exit 0")
    assert call() == (True, ["server", "layer"])


@pytest.mark.long
def test_what_the_limit_leaves_is_told_and_goes_on_in_the_next_call(call, tmp_path, capsys):
    (tmp_path / "tune-hangs").touch()
    assert call(limit=9) == (True, ["tune"]), "the others would not come to half of their turn"
    assert "gpu: the same command continues with: layer a, server b, tune" in capsys.readouterr().out
    (tmp_path / "tune-hangs").unlink()
    assert call() == (True, ["layer", "server", "tune"])


def test_nothing_is_timed_before_the_first_server_is_ready(call, monkeypatch):
    monkeypatch.setattr(module, "has_room", lambda: True)
    server = Task("server", ("b",), 30.0, serves=True)
    tasks = (Task("selection", (), 30.0, beside=True), Task("layer", ("a",), 30.0, is_quick=True), server)
    well, ran = call(tasks=tasks)
    assert (well, sorted(ran[:2]), ran[2:]) == (True, ["selection", "server-ready"], ["layer", "server"])


@pytest.mark.parametrize("deaf", [False, True])
def test_a_process_is_stopped_with_all_it_started(monkeypatch, deaf):
    monkeypatch.setattr(process, "GRACE", 1.0)
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" if deaf else ""
    child = f"subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(60)'])"
    ended = Process(["-c", "\n".join(["import subprocess, time", ignore, child, "time.sleep(60)"])]).finish(1.5)
    assert ended.status is None
    assert ended.seconds < 50  # it would take 60 s if the child held its output
