"""The trace: one JSON line a layer and step, from a ring on the device."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_xshare.stage.record import trace as trace_module
from sglang_xshare.stage.record.trace import Trace
from sglang_xshare.stage.step import Step
from sglang_xshare.types import Batch

NOTHING, ONE = (0.0,) * 7, (1, 2, 1, 1.0, 1)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "trace.jsonl"


def counts(*layers: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor([(*layer, *(0.0,) * (10 - len(layer))) for layer in layers], dtype=torch.float64)


def record(trace, *layers, phase="decode", **observed):
    """A step of which these are the counts."""
    trace.record(counts(*layers), Step(phase, 4, Batch()), observed)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_one_record_a_layer_and_step(file):
    trace = Trace(file, [3, 7], "cpu")
    record(trace, (1, 20, 12, 3.0, 4, 0, 0), (1, 22, 10, 2.0, 4, 0, 1))
    record(trace, (1, 18, 9, 4.0, 4, 0, 0), NOTHING, phase="verify")
    trace.write()
    names = ("step", "phase", "layer", "batch_size", "experts_before", "experts_after", "kept_mass")
    wanted = [(0, "decode", 3, 4, 20, 12, 0.75), (0, "decode", 7, 4, 22, 10, 0.5), (1, "verify", 3, 4, 18, 9, 1.0)]
    lines = [dict(zip(names, values, strict=True)) for values in wanted]
    lines[1]["exact_rows"] = 1
    assert read(file) == lines


def test_page_ins_are_there_where_experts_are_paged(file):
    trace = Trace(file, [3], "cpu", pages=True)
    observed = {"a": counts((1, 20, 12, 3.0, 4, 0, 0, 9, 5)), "b": counts((1, 20, 11, 2.0, 4, 0, 0, 9, 4))}
    record(trace, (1, 20, 20, 4.0, 4, 0, 0, 9, 9), **observed)
    trace.write()
    [found] = read(file)
    assert (found["page_ins_before"], found["page_ins"]) == (9, 9)
    assert found["plans"] == {
        "a": {"experts_after": 12, "kept_mass": 0.75, "page_ins": 5},
        "b": {"experts_after": 11, "kept_mass": 0.5, "page_ins": 4},
    }


def test_as_many_other_plans_have_names_of_their_own_in_the_same_ring(file):
    """Captured graphs go on writing where the ring lies."""
    trace, rings = Trace(file, [0], "cpu"), []
    for name in ("a", "b"):
        record(trace, ONE, **{name: counts(ONE)})
        trace.write()
        rings.append(trace.ring)
    assert rings[0] is rings[1]
    assert [list(found["plans"]) for found in read(file)] == [["a"], ["b"]]


def test_each_record_is_written_once_behind_what_was_there(file, caplog):
    """A step without a live row leaves none."""
    file.write_text('{"step": "earlier"}\n')
    trace = Trace(file, [0], "cpu")
    assert caplog.messages == [f"{file}: not empty; this run's steps are appended, numbered from 0 again"]
    trace.write()
    for steps in ((NOTHING, ONE, NOTHING), (), (ONE,)):
        for step in steps:
            record(trace, step)
        trace.write()
    assert [found["step"] for found in read(file)] == ["earlier", 0, 1]


def test_what_a_full_disk_refused_is_lost_and_nothing_written_twice(file):
    def refuse(*args):
        raise OSError("no space left on device")

    trace = Trace(file, [0], "cpu")
    opened = trace.file
    for failing in (SimpleNamespace(write=opened.write, flush=refuse), SimpleNamespace(write=refuse)):
        record(trace, ONE)
        trace.file = failing
        with pytest.raises(OSError, match="no space"):
            trace.write()
    trace.file = opened
    record(trace, ONE)
    trace.write()
    assert [found["step"] for found in read(file)] == [0, 2]


def test_lost_steps_are_told(file, monkeypatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(trace_module, "CAPACITY", 4)
    trace = Trace(file, [0], "cpu")
    for experts in range(7):
        record(trace, (1, experts, experts, 1.0, 1))
    record(trace, (0, 0, 0, 0.0, 0))  # a step without a live row takes no step's place
    with caplog.at_level(logging.WARNING):
        trace.write()
    assert [(found["step"], found["experts_after"]) for found in read(file)] == [(3, 3), (4, 4), (5, 5), (6, 6)]
    assert caplog.messages == [f"{file}: 3 steps lost; lower --decode-log-interval"]
