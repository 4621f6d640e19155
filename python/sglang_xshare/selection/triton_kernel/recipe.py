"""The recipe, a compile-time argument of the kernel. It lists the parts of the kernel that a plan and a router need."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from triton import next_power_of_2

from ...policies.plan import SelectionPlan
from ...types import Batch, Router, RunnerSlots
from ..handled import COMMON, find_unhandled
from .tile import count_tokens, make_tile

# The options of all our kernels. Every Triton release so far fuses by default, but Triton 3.9 warns if the option is
# absent.
OPTIONS = {"enable_fp_fusion": True}

# The largest number of cells in a tile, because more cells do not fit the registers of a program. A tile of 512 experts
# and 32 rows of one request spills. test/selection/test_triton_compile.py has the bounds for other sizes.
MAX_TILE = 16384
MAX_EXPERTS = 512
HANDLED = COMMON
"""The keys and words that the kernel reads. Torch computes a plan with any other key or word."""
SCORED = ("softmax", "sigmoid", "sqrtsoftplus")
"""The scoring functions that `Recipe` distinguishes."""
# With these limits three sums fit 31 bits. An expert has a utility of up to 2^20 in each row. The shares of one row are
# up to 2^26 each. The shares of all rows are up to 2^20 for each row, plus half a unit for each of 512 experts.
MAX_ROWS, MAX_TOP_K = 2047, 31


@dataclass(frozen=True)
class Recipe:
    """The parts of the kernel that a plan and a router need. The plan's numbers are in `Budgets` instead."""

    num_experts: int
    top_k: int
    scoring: str
    """One of SCORED. A softmax depends on all experts of the row, and sqrtsoftplus has no upper bound. Device functions
    get the whole recipe and compare the word themselves. Triton 3.6 (SGLang 0.5.17) cannot pass a word to a function.
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
    """True if a row's warm-up ends early when it holds a share of the row's scores."""
    skips: bool
    tokens_per_request: int
    """1 if the plan has no budget for each request."""
    per_request: bool
    adds: bool
    reaches_mass: bool
    caps_mass: bool
    """True if `max_add` limits the number of experts that `mass` adds."""
    balance: str | None
    """The plan's `balance`, or None if ranks do not add experts."""
    ranking: str | None
    """The ranking of the best experts, "router" or "votes", or None if the plan has no ranking."""
    follows_voters: bool
    utility_full: bool
    utility_squared: bool
    uses_selected: bool
    substitutes: bool
    divides_by_own: bool
    """This field and the two fields above describe the plan's coverage; see `SelectionPlan`."""
    mixes_own: bool
    """True if weights are divided by a mean of two sums, over the row's experts and over its own top-k."""
    limits_reach: bool
    """True if `max_rank` limits how far down its own ranking a row may take other experts."""
    rescue: bool
    """True if a row can lose all its experts and get its first choice back."""
    columns: int
    """The number of columns for chosen experts."""
    shared: int
    """The number of columns for shared experts, which come after the other columns."""
    shared_weight: float
    lowest: float
    """The lowest finite logit of the dtype."""
    scaling: float
    fill: bool
    """True if no slot may stay empty."""
    weighs: bool
    """True if a row's utility is multiplied by a factor for its depth."""
    warms_some: bool
    """True if only rows up to a certain depth have a warm-up."""
    exact: bool
    """True if some rows may be exact."""
    sets_aside: bool
    """True if the kernel counts the experts of exact rows separately, because a budget must leave them out."""
    plain: bool
    """True if exact rows use a multiple of P for their weights, as without a plan, while other rows use P itself."""
    residents: bool
    """True if loaded experts join S and no budget counts them."""
    bounded: bool
    """True if S must fit the page slots."""
    kmax: int
    """The largest number of experts of a row that is not exact. It equals `columns` unless exact rows use more experts.
    """


def make_recipe(
    plan: SelectionPlan,
    router: Router,
    batch: Batch,
    logits: torch.Tensor,
    slots: RunnerSlots | None = None,
) -> Recipe:
    """Return the recipe for logits [n, N]. `SelectionPlan.check` must have accepted the plan and the router."""
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
    """Return the part of the result of `supports` that depends only on the plan and on sizes.

    The result is cached, because every layer calls the function in every step.
    """
    tile = make_tile(plan, Router(top_k), Batch(tokens_per_request=tokens_per_request), num_rows, num_experts)
    unserved = (
        find_unhandled(plan, __package__),
        num_groups > 1 and (num_experts != tile.experts or num_groups != next_power_of_2(num_groups)),
        num_rows > MAX_ROWS or num_experts > MAX_EXPERTS or top_k > MAX_TOP_K,
        tile.rows * tile.experts > MAX_TILE,
    )
    return not any(unserved)


def _count_groups(router: Router) -> int:
    """Return the number of groups, or 1 if the router does not limit groups."""
    if router.num_expert_group is None or router.topk_group is None or router.topk_group >= router.num_expert_group:
        return 1
    return router.num_expert_group
