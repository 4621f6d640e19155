"""The run's tasks: their order, their turns, what a failure stops and what it does not."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpu.recorded import write_record

from benchmark.common.record import read_record
from benchmark.gpu import eagle3, paged, preflight, replay
from benchmark.gpu import run as module
from benchmark.gpu.models import read_config
from benchmark.gpu.preflight import CHECKS, check_key
from benchmark.gpu.process import Ended, run_process
from benchmark.gpu.run import TASKS, Task, rows, run
from benchmark.gpu.server import CASES
from benchmark.gpu.table import EXPERIMENTS

A, B, C = Task("layer", ("a",), 100.0), Task("server", ("b",), 100.0, needs=("nvcc",)), Task("tune", (), 50.0)


class Stage:
    """A clock, the tasks' processes and the checks, all made up: `ends` says how long a task takes and how it ends."""

    def __init__(self, results: Path) -> None:
        self.results, self.now = results, 0.0
        self.ran: list[str] = []
        self.limits: list[float] = []
        self.ends: dict[str, list[tuple[float, str]]] = {}
        self.checks: dict[str, str | None] = dict.fromkeys(CHECKS)
        self.env: dict[str, str] = {}

    def process(self, arguments, limit, env) -> Ended:
        words = list(arguments)
        experiment, name = words[2], " ".join(words[2 : words.index("--out")])
        self.ran.append(name)
        self.limits.append(limit)
        self.env = dict(env)
        needed, ending = self.ends.get(name, [(10.0, "done")]).pop(0) if self.ends.get(name) else (10.0, "done")
        if ending != "hangs":
            write_record(self.results, experiment, {f"{name} {len(self.ran)}": {"us": 1.0}})
        if needed > limit or ending == "hangs":
            self.now += limit
            return Ended(None, "", limit)
        self.now += needed
        return Ended(1, "it broke", needed) if ending == "fails" else Ended(0, "", needed)

    def run(self, tasks=(A, B, C), limit=None) -> bool:
        self.ran = []
        return run(self.results, ["made up"], tasks, limit, None)

    @property
    def tasks(self) -> dict:
        points = read_record(self.results / "run.json")["points"]
        return {key.removeprefix("task "): point for key, point in points.items() if key.startswith("task ")}


@pytest.fixture
def stage(tmp_path, monkeypatch):
    one = Stage(tmp_path)
    monkeypatch.setattr(module, "run_process", one.process)
    monkeypatch.setattr(module, "monotonic", lambda: one.now)
    monkeypatch.setattr(module, "ENDING", 0.0)
    monkeypatch.setattr(preflight, "CHECKED", tmp_path / "run.json")  # as on the machine that wrote the record
    monkeypatch.setattr(preflight, "run_checks", lambda names, env=None: {name: one.checks[name] for name in names})
    monkeypatch.setattr(preflight, "unpack_published", lambda: False)
    return one


def test_every_task_once_in_order(stage, capsys):
    assert stage.run()
    assert stage.ran == ["layer a", "server b", "tune"]
    assert stage.limits == [module.TURN] * 3  # without a limit of the whole
    assert "left" not in capsys.readouterr().out
    assert stage.run()
    assert stage.ran == []


def test_a_deleted_record_is_measured_anew(stage):
    stage.run()
    (stage.results / "layer.json").unlink()
    stage.run()
    assert stage.ran == ["layer a"]


def test_a_failed_task_stops_no_other_and_is_tried_when_all_others_had_their_turn(stage, capsys):
    stage.ends["layer a"] = [(5.0, "fails")]
    assert not stage.run(limit=120)
    assert stage.ran == ["layer a", "server b", "tune"]
    assert "gpu: layer a: it broke" in capsys.readouterr().out
    assert [row.measured for row in rows(read_record(stage.results / "run.json")["points"])][-1] == "it broke"
    assert stage.run()
    assert stage.ran == ["layer a"]


def test_a_task_goes_on_after_its_turn_when_the_others_have_had_theirs(stage):
    stage.ends["layer a"] = [(130.0, "done"), (30.0, "done")]
    assert stage.run(limit=400)
    assert stage.ran == ["layer a", "server b", "tune", "layer a"]
    assert stage.limits[0] == 100.0


def test_the_end_of_the_whole_is_no_turn(stage, capsys):
    """What the limit cut goes on first in the next call."""
    stage.ends["layer a"] = [(95.0, "done"), (30.0, "done")]
    assert stage.run(limit=60)
    assert (stage.ran, stage.now) == (["layer a"], 60.0)
    assert "gpu: left for the same command: layer a, server b, tune" in capsys.readouterr().out
    assert stage.tasks["layer a"]["turns"] == 0
    assert stage.run(limit=480)
    assert stage.ran == ["layer a", "server b", "tune"]


def test_a_task_that_would_measure_nothing_in_the_time_left_is_not_begun(stage):
    slow = Task("server", ("b",), 100.0, least=90.0)
    stage.run((A, slow, C), limit=95)
    assert stage.ran == ["layer a", "tune"]


def test_a_turn_in_which_nothing_was_measured_is_a_failure(stage, capsys):
    stage.ends["server b"] = [(0.0, "hangs")] * 9
    assert not stage.run(limit=400)
    assert stage.ran == ["layer a", "server b", "tune"]
    assert "gpu: server b: nothing measured in 100 s" in capsys.readouterr().out


def test_what_a_failed_check_forbids_is_not_run_and_said(stage, capsys):
    stage.checks["nvcc"] = "no nvcc"
    assert not stage.run()
    assert stage.ran == ["layer a", "tune"]
    assert "gpu: server b: needs nvcc" in capsys.readouterr().out
    stage.checks["nvcc"] = None
    assert stage.run()
    assert stage.ran == ["server b"]


def test_a_number_of_experts_that_does_not_compile_stops_its_models_servers_alone(stage, capsys):
    stage.checks["compilation"] = stage.checks["compilation-32"] = "32 experts: no kernel"
    assert not stage.run(TASKS)
    assert stage.ran == [task.name for task in TASKS if task.name != "server gpt-oss-20b"]
    assert "gpu: server gpt-oss-20b: needs compilation-32\n" in capsys.readouterr().out


def test_tasks_that_serve_need_their_models_number_of_experts():
    models = {"eagle3": eagle3.MODEL, "replay server": replay.MODEL, "paged": paged.MODEL}
    models |= {f"server {name}": case.model for name, case in CASES.items()}
    for name, model in models.items():
        (task,) = [task for task in TASKS if task.name == name]
        config = read_config(model)
        experts = config.get("num_experts", config.get("num_local_experts"))
        assert [need for need in task.needs if "compilation" in need] == [f"compilation-{experts}"]


def test_tasks_run_with_what_the_checks_found(stage):
    passed = {"passed": True, "reason": "x", "env": preflight.TWO_LAUNCHES}
    write_record(stage.results, "run", {check_key("selection"): passed})
    stage.run()
    assert stage.env == preflight.TWO_LAUNCHES


def test_the_tasks_are_all_there_is_in_the_order_of_their_worth():
    assert [task.experiment for task in TASKS[:3]] == ["selection", "layer", "server"]
    assert {task.experiment for task in TASKS} == set(EXPERIMENTS)
    assert {part for task in TASKS for part in task.parts if task.experiment == "server"} == set(CASES)
    assert [task.name for task in TASKS[-2:]] == ["replay tests", "selection tests"]
    assert all(task.least <= task.turn and set(task.needs) <= set(CHECKS) for task in TASKS)


def test_what_the_release_has_not_is_left_out_and_told(monkeypatch, capsys):
    monkeypatch.setattr(module, "find_tree", lambda: SimpleNamespace(release="0.5.17"))
    assert set(TASKS) - set(module.list_tasks()) == {task for task in TASKS if task.experiment == "paged"}
    assert "gpu: paged: " in capsys.readouterr().out
    monkeypatch.setattr(module, "find_tree", lambda: SimpleNamespace(release="0.5.23"))
    assert tuple(module.list_tasks()) == TASKS


def python(*lines: str) -> list[str]:
    return ["-c", "\n".join(lines)]


def test_a_process_is_shown_and_its_last_words_are_its_reason(capfd):
    ended = run_process(python("print('working')", "import sys", "sys.exit('gpu: no memory\\nmore')"), 60.0, {})
    assert (ended.status, ended.reason) == (1, "no memory")
    assert capfd.readouterr().out == "working\ngpu: no memory\nmore\n"
    assert run_process(python("raise SystemError('x y')"), 60.0, {}).reason == "SystemError: x y"
    assert run_process(python("import os", "os.abort()"), 60.0, {}).reason == "status -6"
    assert run_process(python("import os; assert os.environ['A'] == 'b'"), 60.0, {"A": "b"}).status == 0


@pytest.mark.parametrize("deaf", [False, True])
def test_a_process_is_stopped_with_all_it_started(monkeypatch, deaf):
    monkeypatch.setattr("benchmark.gpu.process.GRACE", 1.0)
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)" if deaf else ""
    child = f"subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(60)'])"
    ended = run_process(python("import subprocess, time", ignore, child, "time.sleep(60)"), 1.5, {})
    assert ended.status is None
    assert ended.seconds < 50  # it would take 60 s if the child held its output
