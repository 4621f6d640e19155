"""Masked logits, which carry a selection to MoE runners that rank logits themselves."""

import torch

from ..policies.plan import SelectionPlan
from ..types import Router, Selection


def check_maskable(plan: SelectionPlan, router: Router) -> None:
    """Raise ValueError for a plan or router whose weights no logits can express: `mask_logits` would not be exact."""
    if router.scoring != "softmax" or router.correction_bias is not None or router.num_expert_group is not None:
        raise ValueError("a runner that ranks logits itself serves plain softmax routers only")
    if router.quota_groups is not None or router.expert_scale is not None:
        raise ValueError("a runner that ranks logits itself serves routers of one group, without a scale by expert")
    if not router.renormalize:
        raise ValueError("a runner that ranks logits itself serves renormalizing routers only")
    if plan.divides_by_own:
        raise ValueError(
            f"coverage = {plan.coverage!r}: must be substitute or own, "
            "because a runner that ranks logits itself renormalizes"
        )
    if plan.own_share:
        raise ValueError(
            f"own_share = {plan.own_share}: must be 0, because a runner that ranks logits itself renormalizes"
        )
    if plan.columns(router) != router.top_k:
        raise ValueError(f"kmax = {plan.kmax}: must be {router.top_k}, the top-k of a runner that ranks logits itself")


def mask_logits(logits: torch.Tensor, selection: Selection, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits whose softmaxed top-k is the selection: exact for renormalizing softmax routers without truncation.

    `logits` [n, N] have any float dtype. Returns the masked logits in the same dtype, and in_use [N] bool, the experts
    that a runner loads for the masked logits: the active experts, and, if these are fewer than top-k, the
    lowest-numbered others up to top-k.

    A row's chosen experts keep their logits. The empty slots of a row must go to distinct experts, because the runner
    keeps a row's experts in a bit mask. Spare experts in use get the lowest finite logit, whose softmax weight is 0. If
    at least top-k active experts are in S and in some row's own top-k, only these are spare, because programs of the
    Triton kernel find these without waiting for each other. Otherwise all experts in use are spare.
    """
    active = selection.active
    missing = top_k - active.sum()
    in_use = active | (~active & ((~active).cumsum(0) <= missing))
    sure = active & selection.selected & selection.vanilla_active
    spare = torch.where(sure.sum() >= top_k, sure, in_use)
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    ids = selection.topk_ids.long()
    chosen.scatter_(1, ids.clamp_min(0), ids >= 0)
    # An empty slot, clamped to id 0, may have unset expert 0, so expert 0 is set from the ids again.
    chosen[:, 0] = (ids == 0).any(1)
    lowest = torch.finfo(logits.dtype).min
    rest = torch.where(spare, lowest, -torch.inf).to(logits.dtype)
    return torch.where(chosen, logits, rest), in_use
