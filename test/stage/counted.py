"""Steps counted in one launch or call beside the same in plain torch, also for the interpreter's process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_xshare import Batch, Router, RunnerSlots, SelectionPlan, select
from sglang_xshare.stage.evidence.metrics import Counters, count_selections
from sglang_xshare.stage.step import Step


def count_steps(
    steps: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]],
    plans: list[SelectionPlan | None],
    router: Router,
    backend: str = "triton",
    slots: RunnerSlots | None = None,
    loaded: torch.Tensor | None = None,
    num_slots: int = 0,
    one_launch: bool = True,
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], Counters]:
    """What was counted and what plain torch counts, [layers, 10], in each step of (logits [layers, n, N], valid [n],
    exact [n]); and the counters. Layers without a plan stay vanilla. `loaded` [layers, N] are the experts in slots,
    where they are paged; what is active is sure to fit those of every second layer. Without `one_launch`, as counted on
    a CPU.
    """
    residents: Any = None if loaded is None else SimpleNamespace(loaded=loaded, slots=num_slots)
    fits = [] if loaded is None else [layer % 2 == 0 for layer in range(len(plans))]
    counters = Counters(len(plans), "cpu", residents)
    counters.in_one_launch = one_launch
    found = []
    for logits, valid, exact in steps:
        step = Step("decode", logits.shape[1], Batch(valid, exact=exact))
        counters.count_outcome("policy", step)
        selections = [
            None
            if plan is None
            else select(one, plan, router, step.batch, backend=backend, slots=slots, tally=counters.tally(layer, one))
            for layer, (one, plan) in enumerate(zip(logits, plans, strict=True))
        ]
        found.append((counters.count(selections, step, fits), count_selections(selections, step, residents, fits)))
    return found, counters


def count_outcomes(outcomes: list[tuple[str, Step | None]], one_launch: bool = True) -> torch.Tensor:
    """Forwards that stay vanilla, counted in one launch each, or as on a CPU."""
    counters = Counters(2, "cpu")
    counters.in_one_launch = one_launch
    for outcome, step in outcomes:
        counters.count_outcome(outcome, step)
    assert not counters.totals.any()
    return counters.outcomes
