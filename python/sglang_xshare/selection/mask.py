"""Masked logits for MoE runners that rank logits themselves. With them such a runner uses the selected experts."""

import torch

from ..policies.plan import SelectionPlan
from ..types import Router, Selection


def check_maskable(plan: SelectionPlan, router: Router) -> None:
    """Raise ValueError if no masked logits can express the weights of this plan and router."""
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
    """Return masked logits. A softmax and a top-k over them give the experts and the weights of the selection.

    The weights are exact for softmax routers that renormalize, if the plan does not truncate.

    `logits` [n, N] have any float dtype. The function returns the masked logits in the same dtype, and `in_use` [N]
    bool. `in_use` marks the experts that a runner loads for the masked logits. These are the active experts. If fewer
    than top-k experts are active, other experts with the lowest ids are added until there are top-k experts.

    A row's chosen experts keep their logits. A row with empty slots also needs spare experts. The spare experts must be
    distinct, because the runner keeps a row's experts in a bit mask. A spare expert gets the lowest finite logit, whose
    softmax weight is 0.

    Some active experts are in the selected set and in some row's own top-k. If there are at least top-k of them, they
    are the spare experts. The programs of the Triton kernel find them without waiting for each other. Otherwise all
    experts in use are spare.
    """
    active = selection.active
    missing = top_k - active.sum()
    in_use = active | (~active & ((~active).cumsum(0) <= missing))
    sure = active & selection.selected & selection.vanilla_active
    spare = torch.where(sure.sum() >= top_k, sure, in_use)
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    ids = selection.topk_ids.long()
    chosen.scatter_(1, ids.clamp_min(0), ids >= 0)
    # An empty slot is clamped to id 0 and may have cleared the mark of expert 0. This line sets the mark from the ids
    # again.
    chosen[:, 0] = (ids == 0).any(1)
    lowest = torch.finfo(logits.dtype).min
    rest = torch.where(spare, lowest, -torch.inf).to(logits.dtype)
    return torch.where(chosen, logits, rest), in_use
