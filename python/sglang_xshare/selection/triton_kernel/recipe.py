"""What the kernel is compiled for: a plan and a router in its terms, and how the batch is cut into tiles."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from triton import next_power_of_2

from ...policies.plan import SelectionPlan
from ...types import Batch, Router, RunnerSlots
from ..handled import COMMON
from .tile import count_tokens, make_tile

# How every kernel of ours is compiled, whatever launches it. Asked for, since Triton 3.9 warns of kernels that do not
# say; every release so far fuses unasked.
OPTIONS = {"enable_fp_fusion": True}

# What the registers of a program hold; those of 32 rows of one request, which lie in one tile, by 512 experts spill.
# What else does is in test/selection/sizes.json.
MAX_TILE = 16384
MAX_EXPERTS = 512
HANDLED = COMMON
"""What the kernel reads of a plan. Torch computes every other plan."""
SCORED = ("softmax", "sigmoid", "sqrtsoftplus")
"""What `Recipe` tells apart."""
# 31 bits hold a column's sum of utilities up to 2^20, and a row's sum of shares up to 2^26; also all rows' shares of
# 2^20 each, with half a unit too much for each of 512 experts.
MAX_ROWS, MAX_TOP_K = 2047, 31


@dataclass(frozen=True)
class Recipe:
    """What a plan and a router have the kernel do, without the plan's numbers (budgets.py): so it compiles once."""

    num_experts: int
    top_k: int
    sigmoid: bool
    """Whether every expert is scored by itself, not by a softmax."""
    softplus: bool
    """Whether that score has no upper bound."""
    biased: bool
    renormalize: bool
    num_groups: int
    """1 where the router does not limit groups."""
    topk_group: int
    quota_groups: int
    """0 where groups have no share of a row's slots."""
    normalize: bool
    """Whether anything needs P itself rather than a multiple of it."""
    unique_keys: bool
    """Whether C is a 16-bit float, which leaves room for the expert's index in a 32-bit key."""
    shares: bool
    """Whether a row's warm-up may end early, at a share of its scores."""
    skips: bool
    tokens_per_request: int
    """1 where the plan does not ask for requests."""
    per_request: bool
    adds: bool
    reaches_mass: bool
    caps_mass: bool
    """Whether only so many experts may be added for a share of the utility."""
    balances: bool
    fill_ranks: bool
    """Whether each rank is filled by itself, not all of them in turn."""
    level_ranks: bool
    """And then at least to what the fullest one has."""
    ranking: str | None
    """What the best experts are found by, "router" or "votes"; None where the plan adds to the warm-up instead."""
    follows_voters: bool
    utility_full: bool
    utility_squared: bool
    uses_selected: bool
    substitutes: bool
    divides_by_own: bool
    """What the plan's coverage means, see `SelectionPlan`."""
    mixes_own: bool
    """Whether weights are divided by a mean of two sums, that over the row's own top-k being one."""
    limits_reach: bool
    """Whether a row may substitute only so far down its own ranking."""
    rescue: bool
    """Whether a row can be left without experts and get its first choice back."""
    columns: int
    """Of the experts chosen."""
    shared: int
    """And of shared experts behind them."""
    shared_weight: float
    lowest: float
    """Of the finite logits."""
    scaling: float
    fill: bool
    """Whether no slot may stay empty."""
    weighs: bool
    """Whether rows count by their depth."""
    warms_some: bool
    """Whether only rows up to a depth have a warm-up."""
    exact: bool
    """Whether some rows may be exact."""
    sets_aside: bool
    """And whether the experts of these are kept apart from others of S, since a budget counts what is in S."""
    plain: bool
    """And whether the model's own weights come of other scores than the plan's steps."""
    residents: bool
    """Whether experts that are loaded cost the plan nothing."""
    bounded: bool
    """And whether S has to fit the slots they are paged into."""
    kmax: int
    """The most experts of a row that is not exact; `columns`, unless exact rows take more of them."""


def make_recipe(
    plan: SelectionPlan,
    router: Router,
    batch: Batch,
    logits: torch.Tensor,
    slots: RunnerSlots | None = None,
) -> Recipe:
    """The recipe for logits [n, N]; the plan has been checked against the router."""
    num_experts = logits.shape[1]
    biased = router.correction_bias is not None
    sigmoid = router.scoring != "softmax"
    by_votes = plan.ranks_experts and plan.ranking == "votes"
    utility_full = plan.utility == "full" or by_votes or plan.confidence is not None
    exact = batch.exact is not None
    normalize = not sigmoid and (biased or utility_full or plan.p < 1 or not router.renormalize)
    return Recipe(
        num_experts=num_experts,
        top_k=router.top_k,
        sigmoid=sigmoid,
        softplus=router.scoring == "sqrtsoftplus",
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
        balances=plan.target_per_rank is not None,
        fill_ranks=plan.balance != "literal",
        level_ranks=plan.balance == "level",
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
    """Whether the kernel serves the plan on logits [num_rows, num_experts]."""
    num_groups = router.quota_groups or _count_groups(router)
    return router.scoring in SCORED and _serves(
        plan, router.top_k, num_groups, batch.tokens_per_request, num_rows, num_experts
    )


@lru_cache(maxsize=4096)
def _serves(
    plan: SelectionPlan, top_k: int, num_groups: int, tokens_per_request: int, num_rows: int, num_experts: int
) -> bool:
    """Found once for a plan and a size: every layer asks in every step, more than once."""
    tile = make_tile(plan, Router(top_k), Batch(tokens_per_request=tokens_per_request), num_rows, num_experts)
    unserved = (
        plan.keys_beyond(HANDLED),
        num_groups > 1 and (num_experts != tile.experts or num_groups != next_power_of_2(num_groups)),
        num_rows > MAX_ROWS or num_experts > MAX_EXPERTS or top_k > MAX_TOP_K,
        tile.rows * tile.experts > MAX_TILE,
    )
    return not any(unserved)


def _count_groups(router: Router) -> int:
    """1 where every group is among the best."""
    if router.num_expert_group is None or router.topk_group is None or router.topk_group >= router.num_expert_group:
        return 1
    return router.num_expert_group
