"""The selection kernel, launched as the stage launches it, at every number of experts that is served."""

from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

import torch

from benchmark.gpu.checks import WORKERS, explain
from sglang_xshare import Batch, Router, RunnerSlots, SelectionPlan, build_plan, select
from sglang_xshare.selection.triton_kernel.budgets import find_budgets
from sglang_xshare.stage.record.counters import Counters
from sglang_xshare.stage.step import Step

EXPERTS = (8, 16, 32, 40, 60, 64, 72, 96, 128, 160, 256, 288, 320, 384, 512)
"""Of the families that SGLang serves."""
PLAN = build_plan("xshare", k0=1, add=4)
ROWS, MANY_ROWS = 16, 128
FORMS = {"": ROWS, " in programs that meet": MANY_ROWS}
"""In words: rows of a batch that is selected so: by one program up to 256 experts; by several from 17 rows on."""
FILLED = RunnerSlots()


def run_steps(
    experts: int,
    device: str,
    plan: SelectionPlan = PLAN,
    rows: int = ROWS,
    slots: RunnerSlots = FILLED,
    tokens_per_request: int = 1,
) -> None:
    """Steps of two layers, counted as on a GPU: both selecting, the first alone, vanilla, a prefill."""
    router = Router(min(8, experts // 4))
    logits = torch.randn(rows, experts, device=device).bfloat16()
    ranks = torch.arange(experts, device=device) * 8 // experts
    step = Step("decode", rows, Batch(torch.ones(rows, dtype=torch.bool, device=device), tokens_per_request))
    counters = Counters(2, device)
    counters.count_outcome("prefill")
    counters.count_outcome("vanilla", step)
    for selecting in (2, 1):
        counters.count_outcome("policy", step)
        tables = counters.begin()
        for layer in range(selecting):
            tally, budgets = tables.of(layer, logits), find_budgets(plan, logits.device)
            select(logits, plan, router, step.batch, ranks, "triton", slots, tally, budgets)
        counters.count(step, tables)


def check(experts: int, form: str) -> str | None:
    """What fails of `run_steps` on this GPU, in that one of `FORMS`; None where nothing does."""
    try:
        run_steps(experts, "cuda", rows=FORMS[form])
        torch.cuda.synchronize()
    except Exception as error:  # a kernel that does not compile, load or launch raises what it likes
        return f"{experts} experts{form}: {explain(error)}"
    return None


def check_served(experts: int) -> None:
    """A model of so many experts as tasks serve it. Raises RuntimeError with what fails first."""
    for form in FORMS:
        if reason := check(experts, form):
            raise RuntimeError(reason)


def check_all() -> list[str]:
    """What fails, of every number of experts: in processes side by side, the kernels that take longest first."""
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        found = pool.map(check, *zip(*product(EXPERTS[::-1], FORMS), strict=True))
        return [one for one in found if one is not None]
