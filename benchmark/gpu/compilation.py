"""The selection kernel, launched as the stage launches it, at every number of experts that is served."""

import torch

from sglang_xshare import Batch, Router, RunnerSlots, SelectionPlan, build_plan, select
from sglang_xshare.selection.triton_kernel.budgets import find_budgets
from sglang_xshare.stage.record.counters import Counters, StepTally
from sglang_xshare.stage.step import Step

EXPERTS = (8, 16, 32, 40, 60, 64, 72, 96, 128, 160, 256, 288, 320, 384, 512)
"""Of the families that SGLang serves."""
PLAN = build_plan("xshare", k0=1, add=4)
ROWS, MANY_ROWS = 16, 128
FORMS = {"": ROWS, " in programs that meet": MANY_ROWS}
"""Rows of a batch that is selected in this form: one program up to 256 experts; several from 17 rows on."""
FILLED = RunnerSlots()


def run_steps(
    experts: int,
    device: str,
    plan: SelectionPlan = PLAN,
    rows: int = ROWS,
    slots: RunnerSlots = FILLED,
    tokens_per_request: int = 1,
) -> None:
    """Run steps of two layers, counted as on a GPU: both selecting, then the first alone."""
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
    """Run the steps of a model with this number of experts, in every form, on this GPU.

    Raises RuntimeError for a kernel that does not compile, load or launch.
    """
    for form, rows in FORMS.items():
        try:
            run_steps(experts, "cuda", rows=rows)
            torch.cuda.synchronize()
        except Exception as error:
            raise RuntimeError(f"{experts} experts{form}: {error}") from error
