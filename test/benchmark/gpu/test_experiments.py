"""Every experiment goes on where its record ends, and refuses models it does not know. Servers are stand-ins here."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
from gpu.recorded import write_record

from benchmark.gpu import checks, eagle3, layer, paged, replay, selection, server, serving, tune
from benchmark.gpu.__main__ import main
from benchmark.gpu.table import list_rows
from refused import refused


def test_a_point_that_fails_costs_no_other_and_is_the_last_to_be_tried_again(tmp_path):
    asked, broken = [], {"a", "c"}

    def call(key):
        asked.append(key)
        if key in broken:
            raise RuntimeError(f"{key} does not launch\nat length")
        return {"us": 1.0}

    record = write_record(tmp_path, "tune", {"d": {"us": 2.0}})
    calls = {key: partial(call, key) for key in "abcd"}
    assert checks.measure_points(record, calls) == "a: a does not launch"
    assert {key: point["us"] for key, point in record.points.items() if "us" in point} == {"d": 2.0, "b": 1.0}
    broken.clear()
    del record.points["b"]
    asked.clear()
    assert list_failed(tmp_path) == [("a", "a does not launch"), ("c", "c does not launch")]
    assert checks.measure_points(record, calls) is None
    assert asked == ["b", "a", "c"]
    assert list_failed(tmp_path) == []


def test_rounds_of_another_workload_are_measured_anew(tmp_path, monkeypatch):
    """Such as those of greedy tokens; texts may lie elsewhere."""
    asked = []
    monkeypatch.setattr(serving, "write_model", Path)
    monkeypatch.setattr(serving, "write_texts", lambda name, tokens: tmp_path / name)
    monkeypatch.setattr(
        serving, "measure", lambda record, key, workload, *rest: asked.append((key in record, workload))
    )
    record = write_record(tmp_path, "server", {})

    def measure(**keys):
        serving.measure_rounds(record, "key", "model", [], [], 4, 3, **keys)
        was_kept, workload = asked[-1]
        record.add("key", workload=asdict(replace(workload, texts=Path("texts"))), series=[])
        return was_kept, workload.temperature

    assert [measure(), measure(), measure(temperature=0.0)] == [(False, 1.0), (True, 1.0), (False, 0.0)]


def list_failed(results):
    return [(row.what, row.measured) for _, row in list_rows(results) if row.bar == "measured"]


@pytest.mark.parametrize("experiment", [selection, layer, server, eagle3, replay, tune, paged])
def test_unknown_parts_are_refused(tmp_path, experiment):
    with pytest.raises(ValueError, match="part qwen4: "):
        experiment.measure(write_record(tmp_path, "any", {}), ["qwen4"])


@pytest.fixture
def run(monkeypatch):
    """Call it with whether there is a GPU and arguments."""

    def call(has_gpu, *arguments):
        monkeypatch.setattr("benchmark.gpu.__main__.has_gpu", lambda: has_gpu)
        monkeypatch.setattr("sys.argv", ["gpu", *arguments])
        return main()

    return call


def test_a_policy_is_for_experiment_tune_alone(tmp_path, run):
    with refused("--policy oea:k0=3"):
        run(True, "layer", "qwen3-30b-a3b", "--policy", "oea:k0=3", "--out", str(tmp_path))
