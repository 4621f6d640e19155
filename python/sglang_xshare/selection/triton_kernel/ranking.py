"""Device functions for single rows: their choice keys, warm-up and top-k, and their part of the counters."""

import triton
import triton.language as tl

from .budgets import ADD_PER_REQUEST, BETA, K0, P, read_count, read_share
from .experts import HOLDER
from .rows import (
    EMPTY,
    begin_rest,
    find_best,
    find_taken,
    keep_quota,
    limit_groups,
    list_best,
    list_next,
    make_unique,
    to_fixed_point,
    to_keys,
)


@triton.jit
def choose_keys(logits, scores, bias, experts, recipe: tl.constexpr) -> tl.tensor:
    """Return keys [R, E] int32 that have the order of C. The key is EMPTY if C is -inf."""
    choice = logits
    if bias is not None:
        shift = tl.load(bias + experts, mask=experts < recipe.num_experts, other=0).to(tl.float32)
        choice = tl.where(logits > float("-inf"), scores + shift[None, :], float("-inf"))
        choice = tl.where(tl.abs(choice) < float("inf"), choice, float("-inf"))
    keys = to_keys(choice)
    there = choice > float("-inf")
    if recipe.num_groups > 1:
        there &= limit_groups(choice, keys, recipe.num_groups, recipe.topk_group, bias is not None)
    if recipe.unique_keys:
        keys = make_unique(keys, experts)
    return tl.where(there, keys, EMPTY)


@triton.jit
def measure(scores, recipe: tl.constexpr, chance=None) -> tl.tensor:
    """Return P in multiples of 2^-20: [R, E] int32.

    If P has no upper bound, it is first divided by its sum in the row. If `chance` [R, 1] is given, P is multiplied by
    it before the rounding.
    """
    scale = 1048576.0
    if recipe.scoring == "sqrtsoftplus":
        # As in `share_scores`, but over more experts, so the sum needs int64.
        largest = tl.max(scores.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
        scores = tl.div_rn(scores, tl.where(largest > 0, largest, 1.0)[:, None])
        total = tl.sum((scores * 67108864.0 + 0.5).to(tl.int64), 1)  # 2^26
        scale = (70368744177664.0 / tl.maximum(total, 1).to(tl.float32))[:, None]  # 2^46
    if chance is not None:
        if recipe.scoring == "sqrtsoftplus":
            scores *= scale / 1048576.0
            scale = 1048576.0
        scores *= chance
    return to_fixed_point(scores, scale)


@triton.jit
def keep_share(
    keys, rest, scores, experts, budgets, k0, listed, listed_experts, recipe: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return each row's warm-up [R, E] bool, then the results of `list_best` for the k0 best experts.

    The warm-up ends when it holds the share `p` of the row's scores. It has at most k0 experts.
    """
    fixed = measure(scores, recipe)
    reach = tl.ceil(tl.sum(fixed, 1).to(tl.float64) * read_share(budgets, P))
    share = tl.full((keys.shape[0],), 0, tl.int32)
    kept = keys < EMPTY
    for turn in range(k0):
        before = rest
        rest, listed, listed_experts = list_next(keys, rest, experts, turn, listed, listed_experts, recipe.unique_keys)
        hit = find_taken(keys, rest, recipe.unique_keys) & ~find_taken(keys, before, recipe.unique_keys)
        kept |= hit & ((turn == 0) | (share.to(tl.float64) < reach))[:, None]
        share += tl.sum(tl.where(hit, fixed, 0), 1)
    return kept, rest, listed, listed_experts


@triton.jit
def rank_rows(
    keys, scores, experts, budgets, recipe: tl.constexpr, tile: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return each row's warm-up and top-k, both [R, E] bool, then the keys and the experts of the top-k.

    With dynamic-skip the warm-up does not contain the skipped experts. Keys and experts are best first, as `list_best`
    returns them.
    """
    k0 = tl.minimum(read_count(budgets, K0), recipe.top_k)
    listed = tl.full((keys.shape[0], tile.columns), EMPTY, tl.int32)
    listed_experts = tl.full((keys.shape[0], tile.columns), 0, tl.int32)
    if recipe.quota_groups:
        keys = keep_quota(keys, recipe.top_k // recipe.quota_groups, recipe.quota_groups, recipe.unique_keys)
    unique: tl.constexpr = recipe.unique_keys
    rest = begin_rest(keys, unique)
    if recipe.shares:
        kept, rest, listed, listed_experts = keep_share(
            keys, rest, scores, experts, budgets, k0, listed, listed_experts, recipe
        )
    else:
        rest, listed, listed_experts = list_best(keys, rest, experts, 0, k0, listed, listed_experts, unique)
        kept = find_taken(keys, rest, unique)
    rest, listed, listed_experts = list_best(keys, rest, experts, k0, recipe.top_k, listed, listed_experts, unique)
    own = find_taken(keys, rest, unique)
    if recipe.skips:
        first = find_best(keys, experts, 1, unique)
        floor = tl.max(tl.where(first, scores, 0), 1).to(tl.float64) * read_share(budgets, BETA)
        kept &= first | (scores.to(tl.float64) >= floor[:, None])
    return kept, own, listed, listed_experts


@triton.jit
def share_scores(scores, recipe: tl.constexpr, chance=None) -> tl.tensor:
    """Return the share of each score in the row's sum, in multiples of 2^-20: [R, E] int32.

    With utility `squared` the share is squared. If `chance` [R, 1] is given, the share is then multiplied by it. The
    product is rounded last.
    """
    # The scores become integers in proportion to the largest score. The sum of integers is exact, so equal scores have
    # equal shares in any order.
    if recipe.biased or recipe.normalize or recipe.scoring != "softmax":
        largest = tl.max(scores.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
        scores = tl.div_rn(scores, tl.where(largest > 0, largest, 1.0)[:, None])
    total = tl.sum((scores * 67108864.0 + 0.5).to(tl.int32), 1)  # 2^26
    scale = 70368744177664.0 / tl.maximum(total, 1).to(tl.float32)  # 2^46
    if recipe.utility_squared or chance is not None:
        shares = scores * (scale / 1048576.0)[:, None]
        if recipe.utility_squared:
            shares *= shares
        if chance is not None:
            shares *= chance
        fixed = to_fixed_point(shares, 1048576.0)
    else:
        fixed = to_fixed_point(scores, scale[:, None])
    return fixed


@triton.jit
def sum_narrow(utility, votes, kept) -> tl.tensor:
    """Return the packed counters [E] int64 of up to 16 rows. They count at most one vote and one holder per expert.

    Only a ranking by votes needs the exact numbers, and it does not use this function. Experts in `kept` must have
    votes. The sum across warps uses int32, which needs half the barriers and shuffles of int64. The sum of 16 utilities
    of at most 2^20 fits 25 bits. The votes and holders of 8 pairs of rows fit 7 bits. Each vote counts 1, and each
    holder counts 9.
    """
    pairs: tl.constexpr = utility.shape[0] // 8
    if pairs > 1:  # the rows of a pair are in the same thread
        shape: tl.constexpr = (pairs, 8, utility.shape[1])
        utility = tl.sum(tl.reshape(utility, shape), 0)
        votes = tl.max(tl.reshape(votes.to(tl.int32), shape), 0) > 0
        kept = tl.max(tl.reshape(kept.to(tl.int32), shape), 0) > 0
    standing = votes.to(tl.int32) + tl.where(kept, 9, 0)
    narrow = tl.sum(utility + (standing << 25), 0).to(tl.uint32, bitcast=True)
    standing = (narrow >> 25).to(tl.int32)
    standing = (standing > 0).to(tl.int32) | ((standing >= 9).to(tl.int32) << 16)
    return (standing.to(tl.int64) << 32) | (narrow & ((1 << 25) - 1)).to(tl.int64)


@triton.jit
def collect_counters(
    scores, kept, own, exempt, free, chance, experts, budgets, recipe: tl.constexpr, tile: tl.constexpr
) -> tl.tensor:
    """Return the packed counters [E] int64 of the tile; experts.py describes their bits.

    If `chance` [R, 1] is given, it multiplies the utilities of each row. `exempt` [R] bool marks the exact rows. An
    exact row holds its experts, and it votes unless the plan ranks experts by votes. `free` [E] bool marks loaded
    experts, which requests do not add.
    """
    if recipe.utility_full:
        utility = measure(scores, recipe, chance)
    else:
        utility = share_scores(tl.where(own, scores, 0), recipe, chance)
    votes = own
    if recipe.exact:
        utility = tl.where(exempt[:, None], 0, utility)
        if recipe.ranking == "votes":
            votes &= ~exempt[:, None]
    if recipe.ranking != "votes" and tile.rows <= 16:
        counters = sum_narrow(utility, votes, kept)
    else:
        standing = votes.to(tl.int32) | (kept.to(tl.int32) << 16)
        counters = tl.sum((standing.to(tl.int64) << 32) | utility.to(tl.int64), 0)
    if recipe.per_request:
        requests: tl.constexpr = (tile.rows // tile.request, tile.request, tile.experts)
        wish = tl.sum(tl.reshape(utility, requests), 1)
        warm = tl.max(tl.reshape(kept.to(tl.int32), requests), 1)
        wish = tl.where((wish > 0) & (warm == 0), wish, EMPTY)
        if recipe.residents:
            wish = tl.where(free[None, :], EMPTY, wish)
        rounds = tl.minimum(read_count(budgets, ADD_PER_REQUEST), recipe.num_experts)
        granted = find_best(wish, experts, rounds, False)
        counters += tl.sum(granted.to(tl.int64), 0) * HOLDER
    return counters
