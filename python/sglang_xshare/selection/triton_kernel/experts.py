"""Device functions on the batch's experts [E]: their counters over all rows, and the set S."""

import triton
import triton.language as tl

from .budgets import ADD, BUDGET, DROP, MASS, MAX_ADD, TARGET_PER_RANK, read_count, read_share
from .rows import EMPTY, find_taken, load_tile, roll, take_best

# Packed counters: one int64 of an expert has three counters, so one reduction and one exchange serve all three. Bits
# 0-31 are the expert's utility in multiples of 2^-20, bits 32-47 its votes (rows with the expert in their top-k), bits
# 48-62 its holders (rows or requests that bring the expert into S). No field overflows with fewer than 2048 rows. Only
# a ranking by votes needs the number of votes, and no plan the number of holders, so a tile of up to 16 rows otherwise
# adds at most one of each, see `sum_narrow`.
VOTE = tl.constexpr(1 << 32)
HOLDER = tl.constexpr(1 << 48)
DIGIT, RADIX = tl.constexpr(4), tl.constexpr(16)  # bits and values of a digit
GROUP = tl.constexpr(8)  # ranks balanced at a time: one in each warp


@triton.jit
def sum_counters(partials, programs, tile: tl.constexpr) -> tl.tensor:
    """Return the sum [E] int64 of the counters that all programs have stored [programs, E]."""
    source = tl.arange(0, 8)
    counters = tl.full((8, tile.experts), 0, tl.int64)
    for first in range(0, programs, 8):
        there = first + source < programs
        counters += load_tile(partials + (first + source) * tile.experts, there, tile.experts, 0, 0, tile.experts)
    return tl.sum(counters, 0)


@triton.jit
def read_utility(counters) -> tl.tensor:
    """Return the utilities [E] int32."""
    return (counters & (VOTE - 1)).to(tl.int32)


@triton.jit
def find_voted(counters, recipe: tl.constexpr) -> tl.tensor:
    """Return the experts in some row's own top-k [E] bool."""
    votes = counters & (HOLDER - 1)
    if recipe.exact and recipe.ranking == "votes":
        votes = counters  # exact rows hold their experts without a vote, and no request adds experts
    return votes >= VOTE


@triton.jit
def find_threshold(keys, weights, limit, most) -> tl.tensor:
    """Return a threshold >= 0: the keys [E] from this number up are the fewest that weigh `limit` or are `most` keys.

    Equal keys count as one. The threshold is 0 if all keys together weigh less. `most` may be None.

    The search compares all keys with 16 numbers, digit by digit, the highest digit first. The search ends when at most
    one key lies in the range of the digit that was found, and returns the lower end of that range. The search takes 2.8
    digits instead of 5.1 (simulated).
    """
    digit = tl.arange(0, RADIX).to(keys.dtype)
    largest = tl.max(keys, 0)
    shift = largest * 0
    while (largest >> shift) >> DIGIT > 0:
        shift += DIGIT
    threshold = largest * 0
    inside = keys.shape[0]
    while (shift >= 0) & (inside > 1):
        number = threshold + (digit << shift)
        weight = tl.sum(tl.where(keys[None, :] >= number[:, None], weights[None, :], 0), 1)
        # For keys of 31 bits, digits from 8 on overflow in the first round; no key is as large as these.
        enough = weight >= limit
        if most is not None:
            enough |= tl.sum((keys[None, :] >= number[:, None]).to(tl.int32), 1) >= most
        reached = tl.sum((enough & (number >= 0)).to(tl.int32), 0)
        threshold += tl.maximum(reached - 1, 0).to(keys.dtype) << shift
        inside = tl.sum((keys >> shift == threshold >> shift).to(tl.int32), 0)
        shift -= DIGIT
    return threshold


@triton.jit
def keep_first(members, weights, limit, most) -> tl.tensor:
    """Return the first of the members [E] bool that weigh `limit` or more together, at most `most`: [E] bool."""
    expert = tl.arange(0, members.shape[0])
    step = roll(members.shape[0])
    last = step * 0
    while step > 0:  # find, bit by bit, the last expert whose predecessors weigh too little
        before = members & (expert < last + step)
        few = tl.sum(tl.where(before, weights, 0), 0) < limit
        if most is not None:
            few &= tl.sum(before.to(tl.int32), 0) < most
        last += tl.where(few, step, 0)
        step >>= 1
    return members & (expert <= last)


@triton.jit
def keep_until(keys, weights, limit, most=None) -> tl.tensor:
    """Return the largest keys above 0 until they weigh `limit` or more together or are `most` keys: [E] bool.

    Of equal keys the first are kept. Equal keys must have equal weights.
    """
    threshold = find_threshold(keys, weights, limit, most)
    above = keys > threshold
    tied = (keys == threshold) & (keys > 0)  # the threshold is 0 if all keys fit
    kept = above | tied
    if tl.sum(tied.to(tl.int32), 0) > 1:  # ties are rare
        if most is not None:
            most -= tl.sum(above.to(tl.int32), 0)
        kept = above | keep_first(tied, weights, limit - tl.sum(tl.where(above, weights, 0), 0), most)
    return kept & (limit > 0)


@triton.jit
def keep_best(keys, limit) -> tl.tensor:
    """Return the `limit` largest of the keys above 0: [E] bool."""
    return keep_until(keys, tl.full(keys.shape, 1, tl.int32), limit)


@triton.jit
def find_members(rank, first) -> tl.tensor:
    """Return which experts are of the ranks from `first` on: [GROUP, E] bool. `rank` [E] int32."""
    return rank[None, :] == (first + tl.arange(0, GROUP))[:, None]


@triton.jit
def count_each(members) -> tl.tensor:
    """Count the members [GROUP, E] bool of each rank: [GROUP] int32."""
    return tl.sum(members.to(tl.int32), 1)


@triton.jit
def count_rounds(rest, rank, last, held, total) -> tl.tensor:
    """Return how many rounds XShare's Algorithm 5 takes: a round takes place if S has fewer than `total` experts.

    S begins with `held` experts, and each round adds the best of each rank's `rest` [E] bool.
    """
    size: tl.constexpr = rest.shape[0]
    added = tl.full((GROUP, size), 0, tl.int32)
    for first in range(0, last + 1, GROUP):
        available = count_each(find_members(rank, first) & rest[None, :])
        added += tl.minimum(available[:, None], tl.arange(0, size)[None, :])
    return tl.sum((held + tl.sum(added, 0) < total).to(tl.int32), 0)


@triton.jit
def find_fullest(selected, rank, last) -> tl.tensor:
    """Return how many of the experts `selected` [E] bool the fullest rank has."""
    fullest = tl.full((GROUP,), 0, tl.int32)
    for first in range(0, last + 1, GROUP):
        fullest = tl.maximum(fullest, count_each(find_members(rank, first) & selected[None, :]))
    return tl.max(fullest, 0)


@triton.jit
def balance_ranks(utility, selected, aside, rank, budgets, recipe: tl.constexpr) -> tl.tensor:
    """Return what the expert-parallel ranks add to S: [E] bool (XShare, Algorithm 5; or our `fill` and `level`).

    Targets do not count the experts `aside` [E] bool. Each round takes the best expert of each of GROUP ranks, which
    stand in place of rows in `take_best`. A rank takes part while it has room. Ranks are read from the device, because
    upstream moves experts between replays of a captured graph.
    """
    size: tl.constexpr = utility.shape[0]
    counted = selected
    if recipe.sets_aside:
        counted &= ~aside
    target = read_count(budgets, TARGET_PER_RANK)
    rest = ~selected & (utility > 0)
    last = tl.max(rank, 0)
    if recipe.balance == "literal":
        held, total = tl.sum(counted.to(tl.int32), 0), target.to(tl.int64) * (last + 1)
        room = count_rounds(rest, rank, last, held, total) + tl.full((GROUP,), 0, tl.int32)
    elif recipe.balance == "level":
        target = tl.maximum(target, find_fullest(selected, rank, last))
    added = tl.full((GROUP, size), 0, tl.int1)
    for first in range(0, last + 1, GROUP):
        members = find_members(rank, first)
        if recipe.balance != "literal":
            room = target - count_each(members & counted[None, :])
        available = members & rest[None, :]
        keys = tl.where(available, utility[None, :], EMPTY)
        left = keys
        for turn in range(tl.max(tl.minimum(room, count_each(available)), 0)):
            _, _, fewer = take_best(keys, left, tl.arange(0, size), False)
            left = tl.where((turn < room)[:, None], fewer, left)
        added |= find_taken(keys, left, False)
    return tl.max(added.to(tl.int32), 0) > 0


@triton.jit
def reach_mass(utility, selected, budgets, recipe: tl.constexpr) -> tl.tensor:
    """Return the experts that S takes, best first, until S holds its mass or has taken `max_add`: [E] bool."""
    rest = tl.where(selected, 0, utility)
    weights = utility  # sums of the rows' shares fit in int32, see MAX_ROWS
    if recipe.utility_full and recipe.scoring == "sigmoid":
        weights = utility.to(tl.int64)
    total = tl.sum(weights, 0)
    held = tl.sum(tl.where(selected, weights, 0), 0)
    reach = tl.ceil(total.to(tl.float64) * read_share(budgets, MASS))
    most = read_count(budgets, MAX_ADD) if recipe.caps_mass else None
    return keep_until(rest, weights, reach.to(weights.dtype) - held, most)


@triton.jit
def join_residents(utility, sure, selected, free, num_resident, recipe: tl.constexpr) -> tl.tensor:
    """Return S [E] bool with the residents that have utility.

    If the number of slots bounds S, experts that are `sure` of a slot come first, then the batch's additions, then
    residents. Additions and residents are ordered by utility.
    """
    joining = tl.where(free & ~selected, utility, 0)
    if recipe.bounded:
        room = num_resident - tl.sum(sure.to(tl.int32), 0)
        added = selected & ~sure
        # Additions rarely exceed the room, so most steps take one ranking, not two.
        if tl.sum(added.to(tl.int32), 0) > room:
            added = keep_best(tl.where(added, utility, 0), room)
        room -= tl.sum(added.to(tl.int32), 0)
        selected = sure | added | keep_best(joining, room)
    else:
        selected |= joining > 0
    return selected


@triton.jit
def select_experts(counters, aside, free, num_resident, rank, budgets, recipe: tl.constexpr) -> tl.tensor:
    """Return S [E] bool: the held experts, and the experts that the plan's budgets add by utility or votes.

    `rank` [E] is each expert's rank if the plan balances ranks. Budgets neither take nor count experts of exact rows
    (`aside` [E] bool) and residents (`free` [E] bool). Residents join at the end, up to `num_resident` slots.
    """
    utility = read_utility(counters)
    selected = counters >= HOLDER
    standing = counters & (HOLDER - 1)  # votes in the high bits, utility in the low bits
    ranked = utility
    if recipe.sets_aside:
        ranked = tl.where(aside, 0, utility)
        standing = tl.where(aside, 0, standing)
    if recipe.ranking == "votes":
        retain = tl.sum((standing >= VOTE).to(tl.int32), 0) - read_count(budgets, DROP)
        retain = tl.maximum(tl.maximum(retain, read_count(budgets, BUDGET)), recipe.top_k)
        selected |= keep_best(standing, retain)
    elif recipe.ranking == "router":
        selected |= keep_best(ranked, read_count(budgets, BUDGET))
    sure = selected
    taken = selected
    if recipe.residents:
        taken |= free
    if recipe.adds:
        added = keep_best(tl.where(taken, 0, utility), read_count(budgets, ADD))
        selected |= added
        taken |= added
    if recipe.reaches_mass:
        selected |= reach_mass(utility, taken, budgets, recipe)
    if recipe.balance is not None:
        selected |= balance_ranks(utility, selected, aside, rank, budgets, recipe)
    if recipe.residents:
        selected = join_residents(utility, sure, selected, free, num_resident, recipe)
    return selected
