"""Device functions that choose each row's experts from S, and compute their order and weights."""

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
    """Return the number of lost rows for each expert: [E] int64. A lost row counts for its first choice.

    A row is lost if S contains no expert of its top-k.
    """
    lost = tl.max((own & selected[None, :]).to(tl.int32), 1) == 0
    return tl.sum((lost[:, None] & find_best(keys, experts, 1, recipe.unique_keys)).to(tl.int32), 0).to(tl.int64)


@triton.jit
def limit_keys(keys, kept, own, exempt, selected, experts, budgets, recipe: tl.constexpr) -> tl.tensor:
    """Return the keys [R, E]. The key of an expert that a row may not use is EMPTY.

    The plan's coverage decides which experts a row may use. `exempt` [R] marks the exact rows, which use their own
    top-k.
    """
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
    """Return a mask of the keys that take a slot, then these keys and their experts.

    The mask is [R, E] bool. The keys and the experts are [R, C], best first.
    """
    listed = tl.full((keys.shape[0], tile.columns), EMPTY, tl.int32)
    listed_experts = tl.full((keys.shape[0], tile.columns), 0, tl.int32)
    unique: tl.constexpr = recipe.unique_keys
    rest = begin_rest(keys, unique)
    rest, listed, listed_experts = list_best(keys, rest, experts, 0, roll(recipe.kmax), listed, listed_experts, unique)
    used = find_taken(keys, rest, unique)
    if recipe.kmax < recipe.columns:  # exact rows may use more experts
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
    """Return P of the listed keys [R, C] in fp32. P of an EMPTY key is 0.

    P has the same bits as if it were computed for the whole row. If the router has a bias, the keys do not contain the
    logits. The logits of the listed experts are then loaded again. `rows` [R] are the addresses of the rows.
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
    """Return the number of members in each row: [R] fp32.

    `members` [R, C] bool marks the members. The result is at least 1, because it becomes a divisor.
    """
    return tl.maximum(tl.sum(members.to(tl.int32), 1), 1).to(tl.float32)


@triton.jit
def lift(mass) -> tl.tensor:
    """Return a factor [R] fp32 that makes a sum large enough to become a divisor.

    The factor is 2^64 for a subnormal sum, whose reciprocal would overflow, and 1 for every other sum. A multiplication
    by this factor is exact.
    """
    return tl.where(mass < 1.1754944e-38, 18446744073709551616.0, 1.0)


@triton.jit
def mix_own(scores, own, own_mass, chosen, mass, budgets) -> tl.tensor:
    """Return scores / mass * (mass / own_mass) ** own_share: [R, C] fp32.

    `mass` is the sum of the scores over the chosen experts. `own_mass` is the sum over the row's own top-k.
    """
    share = read_share(budgets, OWN_SHARE).to(tl.float32)
    # A sum does not matter if its exponent is 0, even if the sum is 0.
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
    """Return the weights [R, C] fp32 of the chosen experts.

    `chosen` [R, C] bool marks the chosen experts, and `mass` [R] is the sum of their scores. `own` [R, C] bool marks
    the row's own top-k, and `own_mass` [R] is the sum of its scores.
    """
    if recipe.mixes_own:
        scores = mix_own(scores, own, own_mass, chosen, mass, budgets)
    elif recipe.renormalize:
        # If all scores are 0, all experts get equal weights.
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
    """Return a mask [E] bool of experts that some row is certain to use. The packed counters are enough to find them.

    These experts are in S and in some row's own top-k. The mask is empty if rows may have fewer slots than top-k, or if
    `max_rank` limits the experts that rows may use.
    """
    sure = selected & find_voted(counters, recipe)
    if recipe.limits_reach or recipe.kmax < recipe.top_k:
        sure = counters < 0
    return sure


@triton.jit
def complete(used: tl.tensor, exists: tl.tensor, top_k: tl.constexpr) -> tl.tensor:
    """Return the used experts [E] bool. If they are fewer than top-k, add other experts with the lowest ids.

    The function is idempotent, even for a partly stored result. A program may therefore store the result while other
    programs still read it. `settle_spare` returns the same experts before and after the store, because all top-k
    experts in use are then spare.
    """
    idle = (exists & ~used).to(tl.int32)
    return used | ((idle > 0) & (tl.cumsum(idle, 0) <= top_k - tl.sum(used.to(tl.int32), 0)))


@triton.jit
def settle_spare(counters, selected, active, arrivals, experts, recipe: tl.constexpr, tile: tl.constexpr) -> tl.tensor:
    """Return a mask [E] bool of the spare experts for masked logits, and complete the active experts.

    If the counters contain too few sure experts, the function waits for the other programs.
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
    """Return an expert that some row uses, or 0 if no row uses an expert; see `sglang_xshare.selection.slots`.

    If the counters contain no such expert, the function waits for the other programs.
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
