"""Measuring everything from one commit: refused where it is not clean, skipped where it is recorded, resumed."""

import json
import sys
from dataclasses import replace
from importlib import import_module

import pytest

from benchmark.common.paths import ROOT
from benchmark.common.record import Record
from benchmark.records import __main__ as command
from benchmark.records.experiments import EXPERIMENTS, Experiment

FIRST, SECOND = (Experiment(name, f"made_up.{name}", name, 1, "--tiny") for name in ("first", "second"))


@pytest.fixture
def source(monkeypatch, tmp_path):
    """A source that is clean at commit c1; what differs from it is in the list that comes back."""
    changes = []
    monkeypatch.setattr(command, "list_changes", lambda: changes)
    monkeypatch.setattr(command, "describe_commit", lambda: "c1")
    monkeypatch.setattr("benchmark.common.machine.describe_commit", lambda: "c1")
    monkeypatch.setattr(command, "is_unchanged_since", lambda commit: commit != "c0" and not changes)
    monkeypatch.setattr(command, "UNFINISHED", tmp_path / "unfinished")
    return changes


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    """Experiments that note their arguments in a file and leave a record; `second` fails while a file tells it to."""
    package = tmp_path / "path" / "made_up"
    package.mkdir(parents=True)
    for name in ("first", "second"):
        (package / f"{name}.py").write_text(f"""
import sys
from pathlib import Path
from benchmark.common.record import Record
here = Path(__file__).parent
with (here / "ran").open("a") as file:
    print("{name}", *[word for word in sys.argv[1:] if word.startswith("--")], file=file)
out = Path(sys.argv[sys.argv.index("--out") + 1])
Record(out, "{name}", ["made up"]).add("point", value=1)
if (here / "fail").exists() and "{name}" == "second":
    sys.exit("second: out of experts")
(out / "{name}.png").write_text("picture")
""")
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{command.ROOT}:{command.ROOT / 'python'}")
    return package


def ran(made_up):
    return (made_up / "ran").read_text().splitlines()


def test_records_and_plots_that_a_page_shows_are_stored_and_then_skipped(source, made_up, tmp_path):
    results = tmp_path / "results"
    command.measure([replace(FIRST, plots=("first.png",)), SECOND], results)
    assert ran(made_up) == ["first --out --resume", "second --out --resume"]
    assert sorted(path.name for path in (results / "first").iterdir()) == ["first.json", "first.png"]
    assert [path.name for path in (results / "second").iterdir()] == ["second.json"]
    command.measure([FIRST, SECOND], results)
    assert len(ran(made_up)) == 2


def test_a_record_of_another_source_is_measured_anew_and_replaced_when_it_is_whole(source, made_up, tmp_path):
    results = tmp_path / "results"
    old = Record(results / "second", "second", [])
    old.add("point", value=2)
    Record(results / "second", "second", []).add("another", value=2)  # a session at the new commit
    text = old.path.read_text().replace('"c1"', '"c0"', 1)
    old.path.write_text(text)
    (made_up / "fail").touch()
    with pytest.raises(RuntimeError, match="second: ended with status 1"):
        command.measure([SECOND], results)
    assert old.path.read_text() == text
    (made_up / "fail").unlink()
    command.measure([SECOND], results)
    assert json.loads(old.path.read_text())["points"]["point"]["value"] == 1


def test_a_changed_source_is_refused_before_anything_runs(source, made_up, tmp_path):
    source += ["python/a.py", "python/b.py"]
    with pytest.raises(ValueError, match=r"must be clean.*python/a\.py and 1 more"):
        command.measure([FIRST], tmp_path / "results")
    assert not (made_up / "ran").exists()
    command.measure([FIRST], tmp_path / "results", dirty=True)
    assert ran(made_up) == ["first --out"]  # not resumed: what it did before had another source
    command.measure([FIRST], tmp_path / "results", small=True, dirty=True)
    assert ran(made_up)[1] == "first --tiny --out"


def test_the_paths_that_decide_a_figure_are_there():
    for one in EXPERIMENTS.values():
        assert [path for path in one.depends if not (ROOT / path).exists()] == []
    assert "benchmark/expert_sharding" in EXPERIMENTS["ranks"].depends
    assert "benchmark/balance/live.py" in EXPERIMENTS["balance-live"].depends


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_a_command_that_takes_its_smallest_size(name, monkeypatch, tmp_path, capsys):
    experiment = EXPERIMENTS[name]
    monkeypatch.setattr(sys, "argv", [experiment.module])
    module = import_module(experiment.module)
    if hasattr(module, "__path__"):
        module = import_module(f"{experiment.module}.__main__")
    with pytest.raises(SystemExit) as stop:
        module.main([*experiment.small.split(), "--out", str(tmp_path), "--help"])
    assert stop.value.code == 0
    assert "--resume" in capsys.readouterr().out
