"""Device functions that cover each row: its experts of S, their order and their weights."""

import triton
import triton.language as tl

from .barrier import wait_for_all
from .budgets import MAX_RANK, OWN_SHARE, read_count, read_share
from .experts import find_voted
from .rows import (
    EMPTY,
    begin_rest,
    find_best,
    find_taken,
    keep_quota,
    list_best,
    load_listed,
    read_expert,
    read_logits,
    roll,
    score_logits,
)


@triton.jit
def find_lost(keys, own, selected, experts, recipe: tl.constexpr) -> tl.tensor:
    """Count the lost rows by their first choice: [E] int64. A row is lost if no expert of its top-k is in S."""
    lost = tl.max((own & selected[None, :]).to(tl.int32), 1) == 0
    return tl.sum((lost[:, None] & find_best(keys, experts, 1, recipe.unique_keys)).to(tl.int32), 0).to(tl.int64)


@triton.jit
def limit_keys(keys, kept, own, exempt, selected, experts, budgets, recipe: tl.constexpr) -> tl.tensor:
    """Return the keys [R, E] of experts that the coverage allows, else EMPTY. Exact rows (`exempt` [R]) use top-k."""
    if not recipe.uses_selected:
        usable = kept
    elif not recipe.substitutes:
        usable = own & selected[None, :]
    elif recipe.limits_reach:
        reach = tl.minimum(read_count(budgets, MAX_RANK), recipe.num_experts)
        near = find_best(keys, experts, reach, recipe.unique_keys)
        usable = kept | (near & selected[None, :])
    else:
        usable = selected[None, :]
    if recipe.exact and recipe.substitutes:
        usable = tl.where(exempt[:, None], own, usable)
    keys = tl.where(usable, keys, EMPTY)
    if recipe.quota_groups and recipe.substitutes:
        keys = keep_quota(keys, recipe.top_k // recipe.quota_groups, recipe.quota_groups, recipe.unique_keys)
    return keys


@triton.jit
def list_usable(
    keys, exempt, experts, recipe: tl.constexpr, tile: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return which keys take a slot [R, E] bool; and the same keys and their experts [R, C], best first."""
    listed = tl.full((keys.shape[0], tile.columns), EMPTY, tl.int32)
    listed_experts = tl.full((keys.shape[0], tile.columns), 0, tl.int32)
    unique: tl.constexpr = recipe.unique_keys
    rest = begin_rest(keys, unique)
    rest, listed, listed_experts = list_best(keys, rest, experts, 0, roll(recipe.kmax), listed, listed_experts, unique)
    used = find_taken(keys, rest, unique)
    if recipe.kmax < recipe.columns:  # exact rows take more
        rest, listed, listed_experts = list_best(
            keys, rest, experts, recipe.kmax, roll(recipe.columns), listed, listed_experts, unique
        )
        used = tl.where(exempt[:, None], find_taken(keys, rest, unique), used)
        column = tl.arange(0, tile.columns)[None, :]
        listed = tl.where(exempt[:, None] | (column < recipe.kmax), listed, EMPTY)
    if unique:
        listed_experts = read_expert(listed, keys.shape[1])
    return used, listed, listed_experts


@triton.jit
def score_listed(
    listed, listed_experts, rows, largest, total, exempt, recipe: tl.constexpr, tile: tl.constexpr
) -> tl.tensor:
    """Return P of listed keys [R, C]: fp32, 0 if a key is EMPTY. P has the same bits as P of the whole row.

    Keys with a bias do not contain the logit. The logit is loaded again, by its expert, from the `rows` [R].
    """
    there = listed > EMPTY
    if recipe.biased:
        logits = load_listed(rows[:, None] + listed_experts, there)
    else:
        logits = read_logits(listed, tile.experts, recipe.unique_keys)
    scores = score_logits(logits, largest, recipe)
    if recipe.normalize:
        shares = tl.div_rn(scores, total)
        scores = tl.where(exempt[:, None], scores, shares) if recipe.plain else shares
    return tl.where(there, scores, 0.0)


@triton.jit
def count(members) -> tl.tensor:
    """Count a row's members [R, C] bool: [R] fp32, at least 1, because the count becomes a divisor."""
    return tl.maximum(tl.sum(members.to(tl.int32), 1), 1).to(tl.float32)


@triton.jit
def lift(mass) -> tl.tensor:
    """Return an exact factor [R] fp32: 2^64 for a sum below the normal numbers, whose reciprocal overflows, else 1."""
    return tl.where(mass < 1.1754944e-38, 18446744073709551616.0, 1.0)


@triton.jit
def mix_own(scores, own, own_mass, chosen, mass, budgets) -> tl.tensor:
    """Return scores over the chosen sum, times (chosen sum / own sum) to the power of `own_share`: [R, C] fp32."""
    share = read_share(budgets, OWN_SHARE).to(tl.float32)
    # A sum whose power is 0 does not matter, even if the sum is 0.
    there = tl.minimum(tl.where(share < 1, mass, own_mass), tl.where(share > 0, own_mass, mass)) > 0
    mass = tl.where(there, mass, count(chosen))
    own_mass = tl.where(there, own_mass, count(own))
    mass = tl.where(share < 1, mass, own_mass)
    own_mass = tl.where(share > 0, own_mass, mass)
    lifted = lift(tl.minimum(mass, own_mass))
    mass *= lifted
    kept = tl.math.exp2(share * (tl.math.log2(mass) - tl.math.log2(own_mass * lifted)))
    return tl.where(there[:, None], scores, 1.0) * lifted[:, None] * ((1.0 / mass) * kept)[:, None]


@triton.jit
def weigh(scores, own, own_mass, chosen, mass, budgets, recipe: tl.constexpr) -> tl.tensor:
    """Return the weights [R, C] fp32 of the `chosen` experts [R, C] bool by their scores.

    `mass` [R] sums these scores, `own_mass` those of the row's own top-k, `own` [R, C] bool.
    """
    if recipe.mixes_own:
        scores = mix_own(scores, own, own_mass, chosen, mass, budgets)
    elif recipe.renormalize:
        # Without any score all experts get equal weights.
        if recipe.divides_by_own:
            mass = own_mass
            chosen = own
        whole = tl.where(mass > 0, mass, count(chosen))
        lifted = lift(whole)
        scores = tl.where((mass > 0)[:, None], scores, 1.0) * lifted[:, None] * (1.0 / (whole * lifted))[:, None]
    if recipe.scaling != 1.0:
        scores *= recipe.scaling
    return scores


@triton.jit
def find_sure(counters, selected, recipe: tl.constexpr) -> tl.tensor:
    """Return experts that some row surely uses, by the packed counters [E] bool.

    These are the experts in S and in some row's top-k, if every row has slots for all of its top-k and may reach them;
    else none.
    """
    sure = selected & find_voted(counters, recipe)
    if recipe.limits_reach or recipe.kmax < recipe.top_k:
        sure = counters < 0
    return sure


@triton.jit
def complete(used: tl.tensor, exists: tl.tensor, top_k: tl.constexpr) -> tl.tensor:
    """Return the used experts [E] bool, with the lowest-numbered others up to top-k.

    The function is idempotent, even on a partly stored result, so a program may store the result while other programs
    still read. `settle_spare` returns the same after the store: the top-k experts in use, which are then all spare.
    """
    idle = (exists & ~used).to(tl.int32)
    return used | ((idle > 0) & (tl.cumsum(idle, 0) <= top_k - tl.sum(used.to(tl.int32), 0)))


@triton.jit
def settle_spare(counters, selected, active, arrivals, experts, recipe: tl.constexpr, tile: tl.constexpr) -> tl.tensor:
    """Return the experts for empty slots of masked logits [E] bool, and complete the active experts.

    The function waits for the other programs if the counters show too few experts.
    """
    spare = find_sure(counters, selected, recipe)
    if tl.sum(spare.to(tl.int32), 0) < recipe.top_k:
        if tile.several:
            wait_for_all(arrivals, tl.num_programs(0))
        else:
            tl.debug_barrier()
        exists = experts < recipe.num_experts
        sure = selected & find_voted(counters, recipe)
        used = tl.load(active + experts, mask=exists, other=0) != 0
        in_use = complete(used, exists, recipe.top_k)
        sure &= used
        enough = tl.sum(sure.to(tl.int32), 0) >= recipe.top_k
        spare = (enough & sure) | (~enough & in_use)
        if tl.program_id(0) == 0:
            tl.store(active + experts, in_use, mask=exists)
    return spare


@triton.jit
def find_filler(counters, selected, active, arrivals, experts, recipe: tl.constexpr, tile: tl.constexpr) -> tl.tensor:
    """Return an expert that some row uses, see `sglang_xshare.selection.slots`; 0 if no row is live.

    The function waits for the other programs if the counters show no such expert.
    """
    size: tl.constexpr = experts.shape[0]
    filler = tl.max(tl.where(find_sure(counters, selected, recipe), experts, -1), 0)
    if filler < 0:
        if tile.several:
            wait_for_all(arrivals, tl.num_programs(0))
        else:
            tl.debug_barrier()
        voted = find_voted(counters, recipe)
        used = tl.load(active + experts, mask=experts < recipe.num_experts, other=0) != 0
        keys = tl.where(used, tl.where(selected & voted, experts + size, experts), 0)
        filler = tl.max(keys, 0) % size
    return filler
