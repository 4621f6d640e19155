"""Expert selection: `select` computes the ids, weights and active experts of a layer with one of several backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from ..policies.plan import SelectionPlan
from ..types import Batch, Router, RunnerSlots, Selection, Tally
from .cpu_call import Call, find_call, is_readable
from .handled import find_unhandled
from .slots import serve_runner

if TYPE_CHECKING:
    from .triton_kernel.budgets import Budgets

BACKENDS = {
    "reference": "sglang_xshare.selection.reference",
    "torch": "sglang_xshare.selection.torch_backend.vectorized",
    "triton": "sglang_xshare.selection.triton_kernel",
    "cpu": "sglang_xshare.selection.cpu_call",
}
"""The module of each backend, by name. Each module has a function `select`, which takes the logits, plan, router, batch
and `rank_of_expert`, and returns a `Selection`. Each module also has `HANDLED`, the keys and words of a plan that the
backend reads. In the compiled backends, "triton" and "cpu", `select` also takes `slots` and `tally`. In "triton" it
also takes `budgets`.
"""

MAX_EXPERTS = 1024
"""The largest number of experts in a layer. Steps of 2^-10 break ties between experts, and the steps of all experts
must add up to less than 1.
"""


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
    """Select experts for the batch, and choose each row's experts among them.

    `router_logits` is a tensor [n, N] of any float dtype; n may be 0. `rank_of_expert` [N] contains the expert-parallel
    rank of each expert, which `target_per_rank` needs. `backend` is a name in BACKENDS, or "auto". With "auto" the
    Triton kernel runs on CUDA and the compiled call runs on a CPU. If they do not support the plan, torch runs.

    If `slots` is given, ids and weights have the form that an MoE runner needs. If `tally` is given, the function
    writes the counted tensors to it. `allocate_tally` makes such a tally for logits of this shape. `budgets` must have
    been made for this plan. It contains the plan's numbers on the device. Only the Triton kernel reads `budgets`; the
    other backends read the plan.

    The function is independent of phases, layers and SGLang. Only backend "reference" waits for the device. Raises
    ValueError naming the input, its value and what is allowed.
    """
    batch = batch or Batch()
    if rank_of_expert is not None:
        rank_of_expert = torch.as_tensor(rank_of_expert, device=router_logits.device)
    _check_inputs(router_logits, plan, router, batch, rank_of_expert)
    if backend == "auto":
        backend = _choose_backend(router_logits, plan, router, batch)
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: must be one of auto, {', '.join(BACKENDS)}")
    if unhandled := find_unhandled(plan, BACKENDS[backend]):
        raise ValueError(f"{unhandled}: not implemented by backend {backend}")
    arguments = router_logits, plan, router, batch, rank_of_expert
    run = import_module(BACKENDS[backend]).select
    if backend == "triton":  # the kernel and the compiled call read `slots` and fill `tally` themselves
        return run(*arguments, slots, budgets=budgets, tally=tally)
    if backend == "cpu":
        return run(*arguments, slots, tally=tally)
    answer = run(*arguments)
    if slots is not None:
        answer = replace(answer, **serve_runner(answer, router_logits, router.top_k, slots))
    if tally is not None:
        tally.take(answer)
    return answer


def _choose_backend(logits: torch.Tensor, plan: SelectionPlan, router: Router, batch: Batch) -> str:
    """Return the backend for the device of the logits. Return "torch" if that backend does not support the plan."""
    backend = "triton" if logits.is_cuda else "cpu" if is_readable(logits) else "torch"
    if backend == "torch" or not import_module(BACKENDS[backend]).supports(plan, router, batch, *logits.shape):
        return "torch"
    return backend


def prepare_call(
    logits: torch.Tensor, plan: SelectionPlan, router: Router, batch: Batch, slots: RunnerSlots | None
) -> Call | None:
    """Return the compiled call for inputs that `select` has checked, or None if `select` would choose another backend.

    The call accepts any logits of the same shape and any flags of their rows. It does not check them again.
    """
    if _choose_backend(logits, plan, router, batch) != "cpu":
        return None
    return find_call(plan, router, logits.shape[1], batch.exact is not None, slots)


def _check_inputs(
    logits: torch.Tensor,
    plan: SelectionPlan,
    router: Router,
    batch: Batch,
    rank_of_expert: torch.Tensor | None,
) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"router_logits {_describe(logits)}: must be a float tensor [rows, experts]")
    rows, num_experts = logits.shape
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"router_logits {_describe(logits)}: must have 1 to {MAX_EXPERTS} experts")
    if rows % batch.tokens_per_request:
        raise ValueError(f"tokens_per_request = {batch.tokens_per_request}: must be a divisor of the {rows} rows")
    for name, tensor, size, kind in (
        ("valid", batch.valid, rows, "bool"),
        ("exact", batch.exact, rows, "bool"),
        ("depth", batch.depth, rows, "int32"),
        ("resident", batch.resident, num_experts, "bool"),
        ("correction_bias", router.correction_bias, num_experts, "float"),
        ("expert_scale", router.expert_scale, num_experts, "float"),
        ("rank_of_expert", rank_of_expert, num_experts, "integer"),
    ):
        if tensor is None:
            continue
        if tensor.shape != (size,) or not _is_kind(tensor, kind):
            article = "an" if kind.startswith("i") else "a"
            raise ValueError(f"{name} {_describe(tensor)}: must be {article} {kind} tensor [{size}]")
        if tensor.device != logits.device:
            raise ValueError(f"{name} on {tensor.device}: must be on {logits.device}, as router_logits")
    if rank_of_expert is not None and rank_of_expert.is_cpu:  # reading a GPU tensor would wait for the GPU
        lowest, highest = (int(rank) for rank in rank_of_expert.long().aminmax())
        if lowest < 0 or highest >= num_experts:
            raise ValueError(f"rank_of_expert from {lowest} to {highest}: must be 0 to {num_experts - 1}")
    plan.check(router, num_experts, ranks=1 if rank_of_expert is None else num_experts)


def _is_kind(tensor: torch.Tensor, kind: str) -> bool:
    if kind in ("float", "integer"):
        return not tensor.is_complex() and tensor.is_floating_point() == (kind == "float")
    return tensor.dtype == getattr(torch, kind)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
