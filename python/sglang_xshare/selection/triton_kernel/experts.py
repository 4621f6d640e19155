"""Device functions for the experts of a batch [E]: their counters over all rows, and the set S."""

import triton
import triton.language as tl

from .budgets import ADD, BUDGET, DROP, MASS, MAX_ADD, TARGET_PER_RANK, read_count, read_share
from .rows import EMPTY, find_taken, load_tile, roll, take_best

# Packed counters: one int64 for each expert contains three counters, so one reduction and one exchange handle all
# three. Bits 0-31 are the utility of the expert in multiples of 2^-20. Bits 32-47 are its votes, the number of rows
# with the expert in their top-k. Bits 48-62 are its holders, the number of rows or requests that add the expert to S.
# No counter overflows with fewer than 2048 rows. Only a ranking by votes needs the number of votes, and no plan needs
# the number of holders. With all other plans a tile of up to 16 rows counts at most one vote and one holder for each
# expert; see `sum_narrow`.
VOTE = tl.constexpr(1 << 32)
HOLDER = tl.constexpr(1 << 48)
DIGIT, RADIX = tl.constexpr(4), tl.constexpr(16)  # the number of bits in a digit, and the number of its values
GROUP = tl.constexpr(8)  # the number of ranks that are balanced at a time, one in each warp


@triton.jit
def sum_counters(partials, programs, tile: tl.constexpr) -> tl.tensor:
    """Return the sum [E] int64 of the counters [programs, E] that the programs have stored."""
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
    """Return a mask [E] bool of the experts that are in some row's own top-k."""
    votes = counters & (HOLDER - 1)
    if recipe.exact and recipe.ranking == "votes":
        votes = counters  # exact rows hold their experts without a vote, and no request adds experts
    return votes >= VOTE


@triton.jit
def find_threshold(keys, weights, limit, most) -> tl.tensor:
    """Return a threshold for the keys [E].

    The keys at or above the threshold reach a limit, and they are as few as possible. Keys reach the limit if their
    weights add up to at least `limit`, or if there are at least `most` of them. `most` may be None. A threshold cannot
    separate equal keys. It is 0 if all keys together do not reach the limit.

    The search finds the threshold digit by digit, the highest digit first. It compares all keys with 16 numbers for
    each digit. The search ends when at most one key is in the range of the digit that was found. It returns the lower
    end of this range. In a simulation the search takes 2.8 digits instead of 5.1.
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
        # For keys of 31 bits, the numbers for the digits from 8 on overflow in the first round. No key is as large as
        # these numbers.
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
    """Return a mask [E] bool of the first members whose weights add up to at least `limit`.

    If `most` is given, the mask has at most `most` members.
    """
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
    """Return a mask [E] bool of the largest keys above 0, taken until their weights add up to `limit`.

    If `most` is given, the mask has at most `most` keys. If keys are equal, the first of them are used. Equal keys must
    have equal weights.
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
    """Return a mask [E] bool of the `limit` largest keys above 0."""
    return keep_until(keys, tl.full(keys.shape, 1, tl.int32), limit)


@triton.jit
def find_members(rank, first) -> tl.tensor:
    """Return a mask [GROUP, E] bool of the experts on each of GROUP ranks, from the rank `first` on.

    `rank` [E] int32 is the rank of each expert.
    """
    return rank[None, :] == (first + tl.arange(0, GROUP))[:, None]


@triton.jit
def count_each(members) -> tl.tensor:
    """Return the number of experts on each rank: [GROUP] int32. `members` [GROUP, E] bool marks the experts."""
    return tl.sum(members.to(tl.int32), 1)


@triton.jit
def count_rounds(rest, rank, last, held, total) -> tl.tensor:
    """Return the number of rounds of XShare's Algorithm 5.

    A round takes place if S has fewer than `total` experts. S has `held` experts before the first round. `rest` [E]
    bool marks the remaining experts. Each round adds the best remaining expert of each rank.
    """
    size: tl.constexpr = rest.shape[0]
    added = tl.full((GROUP, size), 0, tl.int32)
    for first in range(0, last + 1, GROUP):
        available = count_each(find_members(rank, first) & rest[None, :])
        added += tl.minimum(available[:, None], tl.arange(0, size)[None, :])
    return tl.sum((held + tl.sum(added, 0) < total).to(tl.int32), 0)


@triton.jit
def find_fullest(selected, rank, last) -> tl.tensor:
    """Return the number of selected experts on the rank that has the most of them.

    `selected` [E] bool marks the selected experts.
    """
    fullest = tl.full((GROUP,), 0, tl.int32)
    for first in range(0, last + 1, GROUP):
        fullest = tl.maximum(fullest, count_each(find_members(rank, first) & selected[None, :]))
    return tl.max(fullest, 0)


@triton.jit
def balance_ranks(utility, selected, aside, rank, budgets, recipe: tl.constexpr) -> tl.tensor:
    """Return a mask [E] bool of the experts that the expert-parallel ranks add to S.

    `recipe.balance` is "literal" for XShare's Algorithm 5, or "fill" or "level", our additions. `aside` [E] bool marks
    experts that targets do not count. Each round takes the best expert of each of GROUP ranks; `take_best` then treats
    the ranks as rows. A rank takes part while it has room. The ranks are read from the device, because SGLang moves
    experts between two replays of a captured CUDA graph.
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
    """Return a mask [E] bool of the experts that join S.

    Experts join, best first, until S holds the share `mass` of the utility. At most `max_add` experts join S.
    """
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
    """Return S [E] bool after loaded experts with utility have joined it.

    If the number of page slots limits S, the experts in `sure` come first. Then come the experts that the batch has
    added, and then other loaded experts. The last two groups are ordered by utility.
    """
    joining = tl.where(free & ~selected, utility, 0)
    if recipe.bounded:
        room = num_resident - tl.sum(sure.to(tl.int32), 0)
        added = selected & ~sure
        # The added experts rarely exceed the room, so most steps need one ranking instead of two.
        if tl.sum(added.to(tl.int32), 0) > room:
            added = keep_best(tl.where(added, utility, 0), room)
        room -= tl.sum(added.to(tl.int32), 0)
        selected = sure | added | keep_best(joining, room)
    else:
        selected |= joining > 0
    return selected


@triton.jit
def select_experts(counters, aside, free, num_resident, rank, budgets, recipe: tl.constexpr) -> tl.tensor:
    """Return S [E] bool: the experts with holders, and the experts that the plan's budgets add by utility or votes.

    `rank` [E] is the rank of each expert if the plan balances ranks. `aside` [E] bool marks the experts of exact rows,
    and `free` [E] bool marks the loaded experts. Budgets neither add nor count these experts. Loaded experts join S at
    the end, until S has `num_resident` experts.
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
