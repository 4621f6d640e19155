"""Schedules to switch to, steps between two switches, and captures."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from sglang_xshare import Batch, SelectionPlan, hooks
from sglang_xshare.policies.exact import Rule
from sglang_xshare.policies.schedule import Schedule, build_schedule
from sglang_xshare.stage.layer import Layer
from sglang_xshare.stage.stage import Stage
from sglang_xshare.stage.switch import make_next
from sglang_xshare.stage.switch import switch as switch_to
from stage.fake import Model, run

PLANS: list[dict[str, Any]] = [
    {"policy": "xshare", "k0": 1, "add": 5},
    {"policy": "oea", "k0": 2, "kmax": 6},
    {"policy": "pruned", "k0": 1},
    {"policy": "lynx-lat", "retain": 7},
    {"policy": "lynx-acc", "confidence": 0.2},
    {"policy": "moe-spec", "budget": 6, "coverage": "truncate", "phases": ["decode"]},
    {"policy": "dynamic-skip", "beta": 0.5},
]

SIZES = (1, 2, 8)
"""Rows of the steps that `Capturing` captures."""


def schedule(keys: dict[str, Any]) -> Schedule | None:
    own = {name: value for name, value in keys.items() if name != "policy"}
    return build_schedule(keys["policy"], own, speculative=False)


def switch(
    stage: Stage, latter: Schedule | None, reporter: Any, rule: Rule | None = None, recaptures: bool = True
) -> float | None:
    """Switch to another schedule, as `live.control` does."""
    reports = hooks._reports
    assert reports is not None
    assert reports.stage is stage
    reports.reporter = reporter
    last_switch = replace(stage.last_switch, number=stage.last_switch.number + 1)
    return switch_to(reports, make_next(stage, latter, rule), last_switch, recaptures)


def decode(model: Model, reporter: SimpleNamespace, rows: int = 12) -> None:
    """A step, as upstream's scheduler counts it."""
    run(model, "decode", rows)
    reporter.scheduler.forward_ct += 1
    reporter.forward_ct_decode += 1


def run_alone(model: Model, rows: int) -> None:
    run(model, "decode", rows, alone=True)


class Capturing:
    """Captures as SGLang does: the largest size first, each with an eager step and a recorded step.

    The stage takes its device for a GPU, and calls this object to capture again.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Model, stage: Stage) -> None:
        self.model = model
        self.recorded = self.running = False
        self.times, self.failures = 0, 0
        self.failed: list[weakref.ref[torch.Tensor]] = []
        for name, find in (("is_recorded", lambda: self.recorded), ("is_capturing", lambda: self.running)):
            monkeypatch.setattr(f"sglang_xshare.stage.stage.{name}", find)
        monkeypatch.setattr("sglang_xshare.stage.switch.wait_for_device", lambda device: None)
        stage.device, stage.recapture = "cuda", self

    def __call__(self, scheduler: Any = None, fits: Callable[[int], bool] | None = None) -> None:
        self.times += 1
        if self.failures:
            self.failures -= 1
            graphs = torch.empty(1)  # held by the frame that the exception's traceback holds
            self.failed.append(weakref.ref(graphs))
            raise RuntimeError("Capture cuda graph failed:\nout of memory")
        assert not any(found() is not None for found in self.failed), "the memory of a capture that failed"
        for rows in [size for size in reversed(SIZES) if fits is None or fits(size)]:
            self.capture(rows)

    def capture(self, rows: int, step: Callable[[Model, int], Any] = run_alone) -> None:
        """Capture one size: an eager step, then a recorded one. `step` runs the model."""
        self.running = True
        for self.recorded in (False, True):
            step(self.model, rows)
        self.running = self.recorded = False


class Launched(NamedTuple):
    """The inputs of one selection. `budgets` is the buffer that a captured kernel reads, or None."""

    batch: Batch
    plan: SelectionPlan
    budgets: Any


def note_selections(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """Return a list to which each later selection of a layer is appended."""
    launched: list[Launched] = []
    select = Layer.select

    def note(
        layer: Layer, logits: Any, plan: Any, batch: Any, slots: Any = None, tally: Any = None, budgets: Any = None
    ) -> Any:
        launched.append(Launched(batch, plan, budgets))
        return select(layer, logits, plan, batch, slots, tally, budgets)

    monkeypatch.setattr(Layer, "select", note)
    return launched
