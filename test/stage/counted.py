"""Steps counted by what selections leave in a tally, for the interpreter's process."""

from types import SimpleNamespace
from typing import Any

import torch

from sglang_xshare import Batch, Router, RunnerSlots, SelectionPlan, select
from sglang_xshare.stage.record.counters import Counters, StepTally
from sglang_xshare.stage.step import Step

Rows = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""A step's logits [layers, n, N], `valid` [n] and `exact` [n]."""


def count_steps(
    steps: list[Rows],
    plans: list[SelectionPlan | None],
    router: Router,
    backend: str,
    slots: RunnerSlots,
    loaded: torch.Tensor | None = None,
    num_slots: int = 0,
) -> tuple[list[torch.Tensor], Counters]:
    """(each step's counts, [layers, 10]; the counters). None stays vanilla; `loaded` [layers, N], every second fits."""
    residents: Any = None if loaded is None else SimpleNamespace(loaded=loaded, slots=num_slots)
    fits = [] if loaded is None else [layer % 2 == 0 for layer in range(len(plans))]
    counters, found = Counters(len(plans), "cpu", residents), []
    for logits, valid, exact in steps:
        step = Step("decode", logits.shape[1], Batch(valid, exact=exact))
        counted = StepTally(counters)
        for layer, (rows, plan) in enumerate(zip(logits, plans, strict=True)):
            if plan is not None:
                tally = counted.of(layer, rows)
                select(rows, plan, router, step.batch, backend=backend, slots=slots, tally=tally)
        found.append(counters.count(step, counted, fits))
    return found, counters
