"""The recipe for which the kernel is compiled: the parts of the kernel that a plan and a router need."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from triton import next_power_of_2

from ...policies.plan import SelectionPlan
from ...types import Batch, Router, RunnerSlots
from ..handled import COMMON, find_unhandled
from .tile import count_tokens, make_tile

# Options of all our kernels. Every Triton so far fuses by default, but Triton 3.9 warns if the option is absent.
OPTIONS = {"enable_fp_fusion": True}

# Most cells of a tile that fit a program's registers. 32 rows of one request, which lie in one tile, by 512 experts
# spill. test/selection/test_triton_compile.py has bounds of other sizes.
MAX_TILE = 16384
MAX_EXPERTS = 512
HANDLED = COMMON
"""Keys and words that the kernel reads. Torch computes every other plan."""
SCORED = ("softmax", "sigmoid", "sqrtsoftplus")
"""Scorings that `Recipe` distinguishes."""
# Limits at which sums fit 31 bits: a column's utilities of up to 2^20 each, a row's shares of up to 2^26, and the
# shares of all rows, 2^20 each with half a unit too much for each of 512 experts.
MAX_ROWS, MAX_TOP_K = 2047, 31


@dataclass(frozen=True)
class Recipe:
    """The parts of the kernel that a plan and a router need. The plan's numbers are data, see budgets.py."""

    num_experts: int
    top_k: int
    scoring: str
    """One of SCORED. A softmax depends on all experts of the row; sqrtsoftplus has no upper bound. The kernel compares
    such words and passes the recipe: Triton 3.6, that of SGLang 0.5.17, cannot pass a word to a function.
    """
    biased: bool
    renormalize: bool
    num_groups: int
    """1 if the router does not limit groups."""
    topk_group: int
    quota_groups: int
    """0 if the router does not choose the same number of experts from each group."""
    normalize: bool
    """True if some part of the kernel needs P itself, not a multiple of P."""
    unique_keys: bool
    """True if C is a 16-bit float, which leaves room for the expert's index in a 32-bit key."""
    shares: bool
    """True if a row's warm-up may end early, at a share of the row's scores."""
    skips: bool
    tokens_per_request: int
    """1 if the plan has no budget by request."""
    per_request: bool
    adds: bool
    reaches_mass: bool
    caps_mass: bool
    """True if `max_add` limits the experts that are added for a share of the utility."""
    balance: str | None
    """The way in which ranks add experts, see `SelectionPlan`; None if no rank adds any."""
    ranking: str | None
    """Ranking of the best experts, "router" or "votes"; None if the plan adds experts to the warm-up instead."""
    follows_voters: bool
    utility_full: bool
    utility_squared: bool
    uses_selected: bool
    substitutes: bool
    divides_by_own: bool
    """The meaning of the plan's coverage, see `SelectionPlan`."""
    mixes_own: bool
    """True if weights are divided by a mean of two sums, over the row's experts and over its own top-k."""
    limits_reach: bool
    """True if `max_rank` limits how far down its own ranking a row may substitute."""
    rescue: bool
    """True if a row can lose all its experts and get its first choice back."""
    columns: int
    """Columns of the chosen experts."""
    shared: int
    """Columns of shared experts, behind the others."""
    shared_weight: float
    lowest: float
    """The lowest finite logit of the dtype."""
    scaling: float
    fill: bool
    """True if no slot may stay empty."""
    weighs: bool
    """True if a row's utility is multiplied by a factor for its depth."""
    warms_some: bool
    """True if only rows up to a depth have a warm-up."""
    exact: bool
    """True if some rows may be exact."""
    sets_aside: bool
    """True if the experts of exact rows are kept apart from S, because a budget counts the experts in S."""
    plain: bool
    """True if exact rows are weighed by a multiple of P, as without a plan, although other rows need P itself."""
    residents: bool
    """True if loaded experts join S and no budget counts them."""
    bounded: bool
    """True if S must fit the slots that experts are paged into."""
    kmax: int
    """The most experts of a row that is not exact; equal to `columns` unless exact rows take more experts."""


def make_recipe(
    plan: SelectionPlan,
    router: Router,
    batch: Batch,
    logits: torch.Tensor,
    slots: RunnerSlots | None = None,
) -> Recipe:
    """Return the recipe for logits [n, N]. The plan must have been checked against the router."""
    num_experts = logits.shape[1]
    biased = router.correction_bias is not None
    by_votes = plan.ranks_experts and plan.ranking == "votes"
    utility_full = plan.utility == "full" or by_votes or plan.confidence is not None
    exact = batch.exact is not None
    normalize = router.scoring == "softmax" and (biased or utility_full or plan.p < 1 or not router.renormalize)
    return Recipe(
        num_experts=num_experts,
        top_k=router.top_k,
        scoring=router.scoring,
        biased=biased,
        renormalize=router.renormalize,
        num_groups=_count_groups(router),
        topk_group=router.topk_group or 1,
        quota_groups=router.quota_groups or 0,
        normalize=normalize,
        unique_keys=logits.dtype.itemsize == 2 and not biased,
        shares=plan.p < 1,
        skips=plan.beta is not None,
        tokens_per_request=count_tokens(plan, batch),
        per_request=plan.add_per_request > 0,
        adds=plan.add > 0,
        reaches_mass=plan.mass is not None,
        caps_mass=plan.max_add is not None,
        balance=None if plan.target_per_rank is None else plan.balance,
        ranking=plan.ranking if plan.ranks_experts else None,
        follows_voters=plan.confidence is not None,
        utility_full=utility_full,
        utility_squared=plan.utility == "squared" and not utility_full,
        uses_selected=plan.uses_selected,
        substitutes=plan.substitutes,
        divides_by_own=plan.divides_by_own,
        mixes_own=plan.own_share > 0,
        limits_reach=plan.max_rank is not None,
        rescue=plan.can_rescue,
        columns=plan.columns(router, exact),
        shared=slots.shared if slots else 0,
        shared_weight=slots.shared_weight if slots else 1.0,
        lowest=torch.finfo(logits.dtype).min,
        scaling=router.scaling,
        fill=slots is not None and not (slots.masked or slots.empty),
        weighs=plan.weighs(batch.tokens_per_request),
        warms_some=plan.warm_rows is not None,
        exact=exact,
        sets_aside=exact and (plan.ranks_experts or plan.target_per_rank is not None),
        plain=exact and normalize and router.renormalize and not biased,
        residents=batch.resident is not None and plan.takes_residents,
        bounded=batch.resident is not None and plan.takes_residents and batch.slots is not None,
        kmax=plan.columns(router),
    )


def supports(plan: SelectionPlan, router: Router, batch: Batch, num_rows: int, num_experts: int) -> bool:
    """Return whether the kernel supports the plan on logits [num_rows, num_experts]."""
    num_groups = router.quota_groups or _count_groups(router)
    return router.scoring in SCORED and _serves(
        plan, router.top_k, num_groups, batch.tokens_per_request, num_rows, num_experts
    )


@lru_cache(maxsize=4096)
def _serves(
    plan: SelectionPlan, top_k: int, num_groups: int, tokens_per_request: int, num_rows: int, num_experts: int
) -> bool:
    """Return the part of `supports` that is cached by plan and size, because every layer calls it in every step."""
    tile = make_tile(plan, Router(top_k), Batch(tokens_per_request=tokens_per_request), num_rows, num_experts)
    unserved = (
        find_unhandled(plan, __package__),
        num_groups > 1 and (num_experts != tile.experts or num_groups != next_power_of_2(num_groups)),
        num_rows > MAX_ROWS or num_experts > MAX_EXPERTS or top_k > MAX_TOP_K,
        tile.rows * tile.experts > MAX_TILE,
    )
    return not any(unserved)


def _count_groups(router: Router) -> int:
    """Return the number of groups, 1 if the router limits none."""
    if router.num_expert_group is None or router.topk_group is None or router.topk_group >= router.num_expert_group:
        return 1
    return router.num_expert_group
