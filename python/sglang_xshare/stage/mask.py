"""Selection for MoE runners that rank the logits themselves: masked logits say what was chosen."""

from __future__ import annotations

import torch

from ..plan import SelectionPlan
from ..types import Router, Selection


def mask_logits(logits: torch.Tensor, selection: Selection, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits whose top-k, softmaxed, is the selection: exact for renormalizing softmax routers without truncation.

    `logits` [n, N], any float dtype. Returns the masked logits in the same dtype, and awake [N] bool: the experts that
    a runner loads for them. A row's chosen experts keep their logits. Its empty slots must go to distinct experts,
    since the runner holds a row's experts in a bit mask: they go to awake ones, at the lowest finite logit, whose
    softmax weight is 0. Where fewer than top-k experts are active, the lowest-numbered others complete them and are
    counted as awake.
    """
    if logits.is_cuda and len(logits):
        from ..selection.triton_kernel.mask import mask_logits as mask_in_one_launch

        return mask_in_one_launch(logits, selection, top_k)
    active = selection.active
    missing = top_k - active.sum()
    awake = active | (~active & ((~active).cumsum(0) <= missing))
    chosen = torch.zeros_like(logits, dtype=torch.bool)
    ids = selection.topk_ids.long()
    chosen.scatter_(1, ids.clamp_min(0), ids >= 0)
    # An empty slot's id 0 may have unset expert 0: a row's first choice says whether it holds it.
    chosen[:, 0] = (ids == 0).any(1)
    lowest = torch.finfo(logits.dtype).min
    rest = torch.where(awake, lowest, -torch.inf).to(logits.dtype)
    return torch.where(chosen, logits, rest), awake


def check_maskable(plan: SelectionPlan, router: Router) -> None:
    """Raise ValueError for a plan or router whose weights no logits can express."""
    if router.scoring != "softmax" or router.correction_bias is not None or router.num_expert_group is not None:
        raise ValueError("a runner that ranks logits itself serves plain softmax routers only")
    if not router.renormalize:
        raise ValueError("a runner that ranks logits itself serves renormalizing routers only")
    if plan.divides_by_own:
        raise ValueError(
            f"coverage = {plan.coverage!r}: a runner that ranks logits itself renormalizes; "
            "allowed is substitute or own"
        )
    if plan.columns(router) != router.top_k:
        raise ValueError(f"kmax = {plan.kmax}: a runner that ranks logits itself uses top-k; allowed is {router.top_k}")
