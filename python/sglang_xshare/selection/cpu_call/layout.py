"""A plan and a router in the layout of csrc/plan.h. They are packed once, and every call reads the packed structure."""

import ctypes
from ctypes import c_double, c_int32, c_void_p

from ...policies.plan import SelectionPlan
from ...types import Router, RunnerSlots
from ..handled import FULL
from ..scores import DEPTHS, weigh_depths

HANDLED = FULL
"""The keys and words that the compiled call reads. Torch computes a plan with any other key or word."""
_MOST = 2**31 - 1
_DOUBLES = "p beta mass confidence own_power scaling shared_weight"
_COUNTS = (
    "num_experts top_k unbounded renormalize num_groups topk_group quota_groups "
    "warm_up warm_rows utility add_per_request add max_add target_per_rank balance ranks_experts ranking by_request "
    "budget drop max_voters min_votes takes_residents coverage kmax max_rank rescue columns shared fill"
)


class Plan(ctypes.Structure):
    """The C++ structure `expert_selection::Plan`."""

    _fields_ = (
        ("order", c_void_p),
        ("chance", c_void_p),
        *((name, c_double) for name in _DOUBLES.split()),
        *((name, c_int32) for name in _COUNTS.split()),
    )


def pack(plan: SelectionPlan, router: Router, num_experts: int, exact: bool, slots: RunnerSlots | None) -> Plan:
    """Return the packed plan for `num_experts` experts.

    The caller must have checked the plan and the router with `SelectionPlan.check`.
    """
    order = None if plan.order is None else (ctypes.c_int64 * num_experts)(*plan.order)
    chance = None
    if plan.acceptance < 1:
        chance = (ctypes.c_float * DEPTHS)(*weigh_depths(plan.acceptance).tolist())
    counts = {
        "num_experts": num_experts,
        "top_k": router.top_k,
        "unbounded": router.scoring == "sqrtsoftplus",
        "renormalize": router.renormalize,
        "num_groups": router.num_expert_group or 0,
        "topk_group": router.topk_group or 0,
        "quota_groups": router.quota_groups or 0,
        "warm_up": plan.warm_up(router),
        "warm_rows": plan.warm_rows or 0,
        "utility": HANDLED["utility"].index(plan.utility),
        "add_per_request": plan.add_per_request,
        "add": plan.add,
        "max_add": num_experts if plan.max_add is None else plan.max_add,
        "target_per_rank": plan.target_per_rank or 0,
        "balance": HANDLED["balance"].index(plan.balance),
        "ranks_experts": plan.ranks_experts,
        "ranking": HANDLED["ranking"].index(plan.ranking),
        "by_request": plan.scope == "request",
        "budget": plan.budget or 0,
        "drop": -1 if plan.drop is None else plan.drop,
        "max_voters": plan.max_voters,
        "min_votes": plan.min_votes,
        "takes_residents": plan.takes_residents,
        "coverage": HANDLED["coverage"].index(plan.coverage),
        "kmax": plan.kmax or router.top_k,
        "max_rank": plan.max_rank or 0,
        "rescue": plan.can_rescue,
        "columns": plan.columns(router, exact),
        "shared": slots.shared if slots else 0,
        "fill": slots is not None and not (slots.masked or slots.empty),
    }
    packed = Plan(
        order=None if order is None else ctypes.addressof(order),
        chance=None if chance is None else ctypes.addressof(chance),
        p=plan.p,
        beta=-1.0 if plan.beta is None else plan.beta,
        mass=plan.mass or 0.0,
        confidence=plan.confidence or 0.0,
        own_power=plan.own_power,
        scaling=router.scaling,
        shared_weight=slots.shared_weight if slots else 1.0,
        **{name: min(int(value), _MOST) for name, value in counts.items()},
    )
    packed.keeps = order, chance  # kept alive, because the structure holds only their addresses
    return packed
