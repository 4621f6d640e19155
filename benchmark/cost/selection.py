"""What one call of `select()` takes, beside upstream's own router on the same logits."""

import os
from collections.abc import Callable, Sequence

import torch

from benchmark.common.timing import call_timer, time_alternating
from benchmark.common.variant import parse_plan
from benchmark.cost.report import UPSTREAM
from sglang_xshare import Batch, Router, select

TOP_K = 8
TOKENS_PER_REQUEST = 4  # of a plan that asks whose row is whose


def time_selection(rows: int, experts: int, plans: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """CPU seconds a call in every round, of upstream's router and of every plan, on [rows, experts] random logits."""
    logits = torch.randn(rows, experts, generator=torch.Generator().manual_seed(0))
    calls = {UPSTREAM: _make_upstream(logits)} | {plan: make_call(logits, plan) for plan in plans}
    times = time_alternating([call_timer(call) for call in calls.values()], rounds)
    return dict(zip(calls, times, strict=True))


def make_call(logits: torch.Tensor, spelling: str) -> Callable[[], object]:
    """`select()` with a plan as the stage calls it. Raises ValueError for a plan that is none."""
    plan = parse_plan(spelling)
    batch = Batch(tokens_per_request=TOKENS_PER_REQUEST if plan.add_per_request or plan.scope == "request" else 1)
    router = Router(TOP_K)
    return lambda: select(logits, plan, router, batch)


def _make_upstream(logits: torch.Tensor) -> Callable[[], object]:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # or its import looks for a GPU
    from sglang.srt.layers.moe.topk import fused_topk_torch_native

    hidden_states = torch.empty(len(logits), 1)
    return lambda: fused_topk_torch_native(hidden_states, logits, TOP_K, True)
