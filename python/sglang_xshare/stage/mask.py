"""Which plans and routers an MoE runner that ranks the logits itself can follow."""

from __future__ import annotations

from ..plan import SelectionPlan
from ..types import Router


def check_maskable(plan: SelectionPlan, router: Router) -> None:
    """Raise ValueError for a plan or router whose weights no logits can express."""
    if router.scoring != "softmax" or router.correction_bias is not None or router.num_expert_group is not None:
        raise ValueError("a runner that ranks logits itself serves plain softmax routers only")
    if router.quota_groups is not None or router.expert_scale is not None:
        raise ValueError("a runner that ranks logits itself serves routers of one group, without a scale by expert")
    if not router.renormalize:
        raise ValueError("a runner that ranks logits itself serves renormalizing routers only")
    if plan.divides_by_own:
        raise ValueError(
            f"coverage = {plan.coverage!r}: a runner that ranks logits itself renormalizes; "
            "allowed is substitute or own"
        )
    if plan.own_share:
        raise ValueError(f"own_share = {plan.own_share}: a runner that ranks logits itself renormalizes; allowed is 0")
    if plan.columns(router) != router.top_k:
        raise ValueError(f"kmax = {plan.kmax}: a runner that ranks logits itself uses top-k; allowed is {router.top_k}")
