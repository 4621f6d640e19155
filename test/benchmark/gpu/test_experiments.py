"""Every experiment continues where its record ends, and refuses parts it does not know. Servers are stand-ins here."""

from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from common.made_up import Rounds

from benchmark.common import comparison
from benchmark.common.comparison import Comparison, is_measured
from benchmark.common.record import Record
from benchmark.common.variant import parse_variant
from benchmark.gpu import checks, serving
from benchmark.gpu.table import list_rows
from programs import write_program


def list_failed(results):
    return [(row.what, row.measured) for _, row in list_rows(results) if row.bar == "measured"]


def test_a_point_that_fails_costs_no_other_and_is_the_last_to_be_tried_again(tmp_path):
    asked, broken = [], {"a", "c"}

    def call(key):
        asked.append(key)
        if key in broken:
            raise RuntimeError(f"{key} does not launch\nat length")
        return {"us": 1.0}

    record = Record(tmp_path, "tune", [])
    record.add("d", us=2.0)
    calls = {key: partial(call, key) for key in "abcd"}
    assert checks.measure_points(record, calls) == "a: a does not launch"
    assert {key: point["us"] for key, point in record.points.items() if "us" in point} == {"d": 2.0, "b": 1.0}
    assert list_failed(tmp_path) == [("a", "a does not launch"), ("c", "c does not launch")]
    del record.points["b"]
    broken.clear()
    asked.clear()
    assert checks.measure_points(record, calls) is None
    assert asked == ["b", "a", "c"]
    assert list_failed(tmp_path) == []


def test_a_check_that_passed_is_not_run_again(tmp_path):
    record, found = Record(tmp_path, "selection", []), [{"reason": "2 failed"}, {"equal": 3}]
    assert checks.check(record, "cases", lambda: found.pop(0)) == "2 failed"
    assert [checks.check(record, "cases", lambda: found.pop(0)) for _ in range(2)] == [None, None]
    assert record.points["cases"]["equal"] == 3


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Call it for rounds of points 8 and 16, up to one: (point, round) in the order of running."""
    monkeypatch.setattr(serving, "write_model", Path)
    monkeypatch.setattr(serving, "write_texts", lambda name, tokens: tmp_path / name)
    variants = [parse_variant("off"), parse_variant("xshare")]
    points = [serving.Point(f"point {n}", variants, n) for n in (16, 8)]

    def call(record, stop=99, **keys):
        rounds = Rounds(stop)
        monkeypatch.setattr(comparison, "run_rounds", rounds)
        with suppress(KeyboardInterrupt):
            serving.measure_rounds(record, "model", points, [], **keys)
        return rounds.ran

    return call


def test_every_point_has_two_rounds_before_one_has_more(tmp_path, measure):
    record = Record(tmp_path, "server", [])
    first, second = [(16, 0), (16, 1), (8, 0), (8, 1)], [(16, 2), (16, 3), (8, 2), (8, 3)]
    assert measure(record, stop=2) == first
    assert not is_measured(record, "point 8")
    assert measure(Record(tmp_path / "other", "server", [])) == first + second
    assert measure(record) == second, "more rounds go on from those that are there"
    assert is_measured(record, "point 8")
    assert measure(record) == []
    assert Comparison.read(record.points["point 8"]).rounds == 4
    assert len(measure(record, temperature=0.0)) == 8, "rounds of another workload are measured anew"


@pytest.mark.parametrize(("mib", "room"), [("142000", True), ("80000", False), ("[N/A]", False)])
def test_an_h200_has_room_for_several_servers_and_an_h100_has_not(mib, room, tmp_path, monkeypatch):
    write_program(tmp_path / "nvidia-smi", f"echo '{mib}'")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert serving.has_room() == room


def test_unknown_parts_are_refused():
    with pytest.raises(ValueError, match=r"the part of experiment layer must be one of a, b \(got qwen4\)"):
        checks.choose_parts("layer", ["a", "qwen4"], "ab")
    assert checks.choose_parts("layer", [], "ab") == ["a", "b"]
