"""The trace: one JSON line a layer and step, from a ring on the device."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_xshare.stage.record import trace as trace_module
from sglang_xshare.stage.record.trace import Trace
from sglang_xshare.stage.step import Step
from sglang_xshare.types import Batch


def counts(*layers: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor([(*layer, *(0.0,) * (10 - len(layer))) for layer in layers], dtype=torch.float64)


def step(phase: str = "decode") -> Step:
    return Step(phase, 4, Batch())


def read(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


NOTHING = (0.0,) * 7


def test_one_record_a_layer_and_step(tmp_path):
    trace = Trace(tmp_path / "trace.jsonl", [3, 7], "cpu")
    trace.record(counts((1, 20, 12, 3.0, 4, 0, 0), (1, 22, 10, 2.0, 4, 0, 1)), step())
    trace.record(counts((1, 18, 9, 4.0, 4, 0, 0), NOTHING), step("verify"))
    trace.write()
    names = ("step", "phase", "layer", "batch_size", "experts_before", "experts_after", "kept_mass")
    wanted = [(0, "decode", 3, 4, 20, 12, 0.75), (0, "decode", 7, 4, 22, 10, 0.5), (1, "verify", 3, 4, 18, 9, 1.0)]
    lines = [dict(zip(names, record, strict=True)) for record in wanted]
    lines[1]["exact_rows"] = 1
    assert read(tmp_path / "trace.jsonl") == lines


def test_page_ins_are_there_where_experts_are_paged(tmp_path):
    trace = Trace(tmp_path / "trace.jsonl", [3], "cpu", pages=True)
    observed = {"a": counts((1, 20, 12, 3.0, 4, 0, 0, 9, 5)), "b": counts((1, 20, 11, 2.0, 4, 0, 0, 9, 4))}
    trace.record(counts((1, 20, 20, 4.0, 4, 0, 0, 9, 9)), step(), observed)
    trace.write()
    [record] = read(tmp_path / "trace.jsonl")
    assert (record["page_ins_before"], record["page_ins"]) == (9, 9)
    assert record["plans"] == {
        "a": {"experts_after": 12, "kept_mass": 0.75, "page_ins": 5},
        "b": {"experts_after": 11, "kept_mass": 0.5, "page_ins": 4},
    }


def test_as_many_other_plans_have_names_of_their_own_in_the_same_ring(tmp_path):
    """Captured graphs go on writing where the ring lies."""
    trace, once = Trace(tmp_path / "trace.jsonl", [0], "cpu"), counts((1, 2, 1, 1.0, 1))
    rings = []
    for name in ("a", "b"):
        trace.record(once, step(), {name: once})
        trace.write()
        rings.append(trace.ring)
    assert rings[0] is rings[1]
    assert [list(record["plans"]) for record in read(tmp_path / "trace.jsonl")] == [["a"], ["b"]]


def test_each_record_is_written_once_behind_what_was_there(tmp_path, caplog):
    file = tmp_path / "trace.jsonl"
    file.write_text('{"step": "earlier"}\n')
    trace = Trace(file, [0], "cpu")
    assert caplog.messages == [f"{file}: not empty; this run's steps are appended, numbered from 0 again"]
    trace.write()
    trace.record(counts((1, 2, 1, 1.0, 1, 0, 0)), step())
    trace.write()
    trace.write()
    trace.write()
    trace.record(counts((1, 2, 1, 1.0, 1, 0, 0)), step())
    trace.write()
    assert [record["step"] for record in read(file)] == ["earlier", 0, 1]


def test_what_a_full_disk_refused_is_lost_and_nothing_written_twice(tmp_path, monkeypatch):
    file = tmp_path / "trace.jsonl"
    trace = Trace(file, [0], "cpu")
    trace.record(counts((1, 2, 1, 1.0, 1, 0, 0)), step())
    with monkeypatch.context() as full:

        def refuse(*args):
            raise OSError("no space left on device")

        full.setattr(trace, "file", SimpleNamespace(write=trace.file.write, flush=refuse, name=file))
        with pytest.raises(OSError, match="no space"):
            trace.write()
        trace.record(counts((1, 2, 1, 1.0, 1, 0, 0)), step())
        full.setattr(trace.file, "write", refuse)
        with pytest.raises(OSError, match="no space"):
            trace.write()
    trace.record(counts((1, 2, 1, 1.0, 1, 0, 0)), step())
    trace.write()
    assert [record["step"] for record in read(file)] == [0, 2]


def test_step_without_a_live_row_leaves_no_record(tmp_path):
    trace = Trace(tmp_path / "trace.jsonl", [0], "cpu")
    trace.record(counts(NOTHING), step())
    trace.record(counts((1, 2, 1, 1.0, 1, 0, 0)), step())
    trace.record(counts(NOTHING), step())
    trace.write()
    assert [record["step"] for record in read(tmp_path / "trace.jsonl")] == [0]


def test_lost_steps_are_told(tmp_path, monkeypatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(trace_module, "CAPACITY", 4)
    trace = Trace(tmp_path / "trace.jsonl", [0], "cpu")
    for experts in range(7):
        trace.record(counts((1, experts, experts, 1.0, 1, 0, 0)), step())
    with caplog.at_level(logging.WARNING):
        trace.write()
    assert [(r["step"], r["experts_after"]) for r in read(tmp_path / "trace.jsonl")] == [(3, 3), (4, 4), (5, 5), (6, 6)]
    assert caplog.messages == [f"{tmp_path / 'trace.jsonl'}: 3 steps lost; lower --decode-log-interval"]
