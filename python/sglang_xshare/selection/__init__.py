"""Selection: a plan and router logits give ids, weights and the active set. One `select()` in front of all backends."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from ..policies.plan import SelectionPlan
from ..types import Batch, Router, RunnerSlots, Selection, Tally
from .cpu_call import Call, is_readable
from .cpu_call import prepare as prepare_call

if TYPE_CHECKING:
    from .triton_kernel.budgets import Budgets

BACKENDS = {
    "reference": "sglang_xshare.selection.reference",
    "torch": "sglang_xshare.selection.torch_backend.vectorized",
    "triton": "sglang_xshare.selection.triton_kernel",
    "cpu": "sglang_xshare.selection.cpu_call",
}
"""Name -> module with a function `select(logits, plan, router, batch, rank_of_expert, slots) -> Selection`."""

MAX_EXPERTS = 1024
"""Ties between experts are broken by steps of 2^-10, which must not add up to 1."""


def select(
    router_logits: torch.Tensor,
    plan: SelectionPlan,
    router: Router,
    batch: Batch | None = None,
    rank_of_expert: torch.Tensor | Sequence[int] | None = None,
    backend: str = "auto",
    slots: RunnerSlots | None = None,
    tally: Tally | None = None,
    budgets: Budgets | None = None,
) -> Selection:
    """Select the batch's experts and route every row within them.

    `router_logits` [n, N] in any float dtype, n may be 0. `rank_of_expert` [N] holds each expert's expert-parallel
    rank, for `target_per_rank`. `backend` is one of BACKENDS, or "auto": the Triton kernel on CUDA, the compiled call
    on a CPU, each for what it supports, else torch. `slots` asks for slots as an MoE runner takes them, none of id -1.
    Knows nothing of phases, layers or SGLang; no backend but "reference" waits for the device. What is counted of it is
    left in `tally` too. `budgets`, made for the plan, are where the Triton kernel reads the plan's numbers; the others
    read the plan. Raises ValueError naming what is wrong and what is allowed.
    """
    batch = batch or Batch()
    if rank_of_expert is not None:
        rank_of_expert = torch.as_tensor(rank_of_expert, device=router_logits.device)
    _check_inputs(router_logits, plan, router, batch, rank_of_expert)
    if backend == "auto":
        backend = _choose_backend(router_logits, plan, router, batch)
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: allowed is auto, {', '.join(BACKENDS)}")
    arguments = router_logits, plan, router, batch, rank_of_expert, slots
    run = import_module(BACKENDS[backend]).select
    if backend == "triton":  # which fills the tally itself, as the next does
        return run(*arguments, budgets=budgets, tally=tally)
    if backend == "cpu":
        return run(*arguments, tally=tally)
    answer = run(*arguments)
    if tally is not None:
        tally.take(answer)
    return answer


def _choose_backend(logits: torch.Tensor, plan: SelectionPlan, router: Router, batch: Batch) -> str:
    """The backend made for the logits' device where it serves the plan, else torch."""
    backend = "triton" if logits.is_cuda else "cpu" if is_readable(logits) else "torch"
    if backend == "torch" or not import_module(BACKENDS[backend]).supports(plan, router, batch, *logits.shape):
        return "torch"
    return backend


def prepare(
    logits: torch.Tensor, plan: SelectionPlan, router: Router, batch: Batch, slots: RunnerSlots | None
) -> Call | None:
    """What `select`, which has taken these, runs where it chooses the compiled call, else None. It takes other logits
    of the shape and other flags unchecked.
    """
    if _choose_backend(logits, plan, router, batch) != "cpu":
        return None
    return prepare_call(plan, router, logits.shape[1], batch.exact is not None, slots)


def _check_inputs(
    logits: torch.Tensor, plan: SelectionPlan, router: Router, batch: Batch, rank_of_expert: torch.Tensor | None
) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"router_logits {_describe(logits)}: allowed is a float tensor [rows, experts]")
    rows, num_experts = logits.shape
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"router_logits {_describe(logits)}: allowed is 1 to {MAX_EXPERTS} experts")
    if rows % batch.tokens_per_request:
        raise ValueError(f"tokens_per_request = {batch.tokens_per_request}: allowed is a divisor of the {rows} rows")
    for name, flags in (("valid", batch.valid), ("exact", batch.exact)):
        if flags is not None and (flags.shape != (rows,) or flags.dtype != torch.bool):
            raise ValueError(f"{name} {_describe(flags)}: allowed is a bool tensor [{rows}]")
    if batch.depth is not None and (batch.depth.shape != (rows,) or batch.depth.dtype != torch.int32):
        raise ValueError(f"depth {_describe(batch.depth)}: allowed is an int32 tensor [{rows}]")
    bias, resident = router.correction_bias, batch.resident
    if resident is not None and (resident.shape != (num_experts,) or resident.dtype != torch.bool):
        raise ValueError(f"resident {_describe(resident)}: allowed is a bool tensor [{num_experts}]")
    if bias is not None and (bias.shape != (num_experts,) or not bias.is_floating_point()):
        raise ValueError(f"correction_bias {_describe(bias)}: allowed is a float tensor [{num_experts}]")
    scale = router.expert_scale
    if scale is not None and (scale.shape != (num_experts,) or not scale.is_floating_point()):
        raise ValueError(f"expert_scale {_describe(scale)}: allowed is a float tensor [{num_experts}]")
    if rank_of_expert is not None and (rank_of_expert.shape != (num_experts,) or rank_of_expert.is_floating_point()):
        raise ValueError(f"rank_of_expert {_describe(rank_of_expert)}: allowed is an integer tensor [{num_experts}]")
    plan.check(router, num_experts, ranks=1 if rank_of_expert is None else num_experts)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
