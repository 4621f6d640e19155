"""Launches of the selection kernel, with the same arguments as in a server."""

import torch

from sglang_xshare import Batch, Router, RunnerSlots, SelectionPlan, build_plan, select
from sglang_xshare.selection.triton_kernel.budgets import find_budgets
from sglang_xshare.stage.record.counters import Counters, StepTally
from sglang_xshare.stage.step import Step

EXPERTS = (8, 16, 32, 40, 60, 64, 72, 96, 128, 160, 256, 288, 320, 384, 512)
"""The numbers of experts in the model families that SGLang supports."""
PLAN = build_plan("xshare", k0=1, add=4)
ROWS, MANY_ROWS = 16, 128
FORMS = {"": ROWS, " in programs that meet": MANY_ROWS}
"""The number of rows that leads to each form of the kernel.

For each number of experts in `EXPERTS`, the kernel uses one program for 16 rows and several programs for 128 rows.
"""
FILLED = RunnerSlots()


def run_steps(
    experts: int,
    device: str,
    plan: SelectionPlan = PLAN,
    rows: int = ROWS,
    slots: RunnerSlots = FILLED,
    tokens_per_request: int = 1,
) -> None:
    """Run two steps of a model with two layers, and count them as a server does.

    In the first step both layers select experts, and in the second step only the first layer does.
    """
    router = Router(min(8, experts // 4))
    logits = torch.randn(rows, experts, device=device).bfloat16()
    ranks = torch.arange(experts, device=device) * 8 // experts
    step = Step("decode", rows, Batch(torch.ones(rows, dtype=torch.bool, device=device), tokens_per_request))
    counters = Counters(2, device)
    for selecting in (2, 1):
        counted = StepTally(counters)
        for layer in range(selecting):
            tally, budgets = counted.of(layer, logits), find_budgets(plan, logits.device)
            select(logits, plan, router, step.batch, ranks, "triton", slots, tally, budgets)
        counters.count(step, counted)


def check_served(experts: int) -> None:
    """Run all forms of the selection kernel for this number of experts.

    Raises RuntimeError if a kernel does not compile, load or launch.
    """
    for form, rows in FORMS.items():
        try:
            run_steps(experts, "cuda", rows=rows)
            torch.cuda.synchronize()
        except Exception as error:
            raise RuntimeError(f"{experts} experts{form}: {error}") from error
