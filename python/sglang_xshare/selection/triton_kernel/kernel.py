"""The fused selection kernel: from router logits to ids, weights and the active set.

    logits [n, N] -> P, C [R, E]                a tile of R rows a program, one warp a row
        -> own rank [R, E] int32                rounds of `pop_best` over C: each row's top-k, its warm-up
        -> words [E] int64                      utility, votes, holders, summed over the tile's rows
        ~> sum of the programs' words           with several programs only; integers, so the order does not matter
        -> S [E] bool                           in every program, from the same words
        -> topk_ids, topk_weights [n, columns]  rounds of `pop_best` over C within S

A small batch is one program: nothing leaves the SM between logits and ids. The rows of a larger one, which would keep one SM
busy for too long, are spread over programs that exchange their words once, across a grid barrier. Where not all programs can
be resident at once, the barrier becomes the border between two launches, and the second repeats the rows' own ranking: cheaper
than storing it. Rounds of a maximum, not a sort: k is about 8, and a round costs a row one or two `redux` instructions, where a
bitonic sort of 128 experts takes 28 exchanges.
"""

import triton
import triton.language as tl

from .experts import HOLDER, VOTE, select_experts, wait_for_all
from .rows import EMPTY, limit_groups, load_logits, make_unique, pop_best, score_rows, to_grid, to_keys

UNRANKED = tl.constexpr(2**15)


@triton.jit
def choose_keys(logits, scores, bias, experts, recipe: tl.constexpr):
    """[R, E] int32 in the order of C, EMPTY where C is -inf."""
    choice = logits
    if bias is not None:
        shift = tl.load(bias + experts, mask=experts < recipe.num_experts, other=0).to(tl.float32)
        choice = tl.where(logits > float("-inf"), scores + shift[None, :], float("-inf"))
        choice = tl.where(tl.abs(choice) < float("inf"), choice, float("-inf"))
    if recipe.num_groups > 1:
        choice = limit_groups(choice, recipe.num_groups, recipe.topk_group, bias is not None)
    keys = to_keys(choice)
    if recipe.unique_keys:
        keys = make_unique(keys, experts)
    return tl.where(choice > float("-inf"), keys, EMPTY)


@triton.jit
def rank_rows(keys, scores, experts, recipe: tl.constexpr):
    """(each expert's rank in its row [R, E] int32, UNRANKED beyond `recipe.depth`; whether the row keeps it [R, E] bool)."""
    rank = tl.full(keys.shape, UNRANKED, tl.int32)
    if recipe.p < 1:
        grid = to_grid(scores)
        reach = tl.ceil(tl.sum(grid, 1).to(tl.float64) * recipe.p)
        share = tl.zeros((keys.shape[0],), tl.int32)
        length = tl.full((keys.shape[0],), min(recipe.k0, 1), tl.int32)
    for turn in range(recipe.depth):
        hit, keys = pop_best(keys, experts, recipe.unique_keys)
        rank = tl.where(hit, turn, rank)
        if recipe.p < 1:
            share += tl.sum(tl.where(hit, grid, 0), 1)
            length += ((turn < recipe.k0 - 1) & (share.to(tl.float64) < reach)).to(tl.int32)
    kept = rank < recipe.k0
    if recipe.p < 1:
        kept = rank < length[:, None]
    if recipe.beta is not None:
        floor = tl.max(tl.where(rank == 0, scores, 0), 1).to(tl.float64) * recipe.beta
        kept &= (rank == 0) | (scores.to(tl.float64) >= floor[:, None])
    return rank, kept


@triton.jit
def collect_words(scores, own, kept, experts, recipe: tl.constexpr, tile: tl.constexpr):
    """What the tile's rows say about every expert: [E] int64, see experts.py."""
    if recipe.utility_full:
        utility = to_grid(scores)
    else:
        inside = tl.where(own, scores, 0).to(tl.float64)
        total = tl.sum(inside, 1)
        utility = to_grid(inside * (1.0 / tl.where(total > 0, total, 1.0))[:, None])
    words = tl.sum(utility.to(tl.int64) + own.to(tl.int64) * VOTE + kept.to(tl.int64) * HOLDER, 0)
    if recipe.add_per_request > 0:
        requests: tl.constexpr = (tile.rows // tile.request, tile.request, tile.experts)
        wish = tl.sum(tl.reshape(utility, requests), 1)
        warm = tl.max(tl.reshape(kept.to(tl.int32), requests), 1)
        wish = tl.where((wish > 0) & (warm == 0), wish, EMPTY)
        added = tl.zeros(wish.shape, tl.int64)
        for _ in range(recipe.add_per_request):
            hit, wish = pop_best(wish, experts, False)
            added += hit.to(tl.int64)
        words += tl.sum(added, 0) * HOLDER
    return words


@triton.jit
def rescue_rows(selected, own, rank):
    """(S with the first choice of every row that has none of its top-k in S, the number of such rows)."""
    in_reach = tl.max((own & selected[None, :]).to(tl.int32), 1)
    lost = (in_reach == 0)[:, None] & (rank == 0)
    return selected | (tl.max(lost.to(tl.int32), 0) > 0), tl.sum(tl.sum(lost.to(tl.int64), 1), 0)


@triton.jit
def cover_rows(keys, rank, own, kept, selected, experts, recipe: tl.constexpr):
    """Each expert's slot in its row [R, E] int32, `recipe.columns` where the row does not use it."""
    if recipe.coverage == "own":
        usable = kept
    elif recipe.coverage == "truncate":
        usable = own & selected[None, :]
    elif recipe.max_rank is not None:
        usable = kept | (selected[None, :] & (rank < recipe.max_rank))
    else:
        usable = selected[None, :]
    rest = tl.where(usable, keys, EMPTY)
    slots = tl.full(keys.shape, recipe.columns, tl.int32)
    for slot in range(recipe.columns):
        hit, rest = pop_best(rest, experts, recipe.unique_keys)
        slots = tl.where(hit, slot, slots)
    return slots


@triton.jit
def weigh(scores, shared, renormalize: tl.constexpr):
    """Weights [R, E] fp32: P, or P over its sum in the `shared` experts; equal shares where that sum is 0."""
    if renormalize:
        total = tl.sum(tl.where(shared, scores, 0), 1)[:, None]
        count = tl.sum(shared.to(tl.int32), 1)[:, None]
        share = tl.div_rn(1.0, tl.maximum(count, 1).to(tl.float32))
        return tl.where(total > 0, tl.div_rn(scores, tl.where(total > 0, total, 1.0)), share)
    else:
        return scores


@triton.jit
def select_kernel(
    logits,  # [n, N] fp32, fp16 or bf16; the experts of a row are contiguous
    valid,  # [n] bool, or None
    bias,  # [N] float, or None
    partials,  # [programs, E] int64: scratch of several programs
    arrivals,  # [1] int32: the barrier's counter
    topk_ids,  # [n, columns] int32
    topk_weights,  # [n, columns] fp32
    selected_out,  # [N] bool
    active,  # [N] bool
    vanilla_active,  # [N] bool
    kept_mass,  # [n] fp32
    rescued,  # [] int64
    num_rows,
    row_stride,
    recipe: tl.constexpr,
    tile: tl.constexpr,
    votes: tl.constexpr,  # whether this launch holds what comes before the barrier
    routes: tl.constexpr,  # and what comes after
):
    program = tl.program_id(0)
    experts = tl.arange(0, tile.experts)
    exists = experts < recipe.num_experts
    # The rows of a request are padded to a power of two in the tile.
    place = tl.arange(0, tile.rows)
    request = program * (tile.rows // tile.request) + place // tile.request
    row = request * recipe.tokens_per_request + place % tile.request
    present = (place % tile.request < recipe.tokens_per_request) & (row < num_rows)
    live = present
    if valid is not None:
        live &= tl.load(valid + row, mask=present, other=0) != 0

    rows = load_logits(logits + row.to(tl.int64) * row_stride, live, recipe.num_experts, 0, tile.experts)
    scores = score_rows(rows, recipe.sigmoid, recipe.normalize)
    keys = choose_keys(rows, scores, bias, experts, recipe)
    rank, kept = rank_rows(keys, scores, experts, recipe)
    own = rank < recipe.top_k
    words = collect_words(scores, own, kept, experts, recipe, tile)

    if tile.programs > 1:
        if votes:
            tl.store(partials + program * tile.experts + experts, words)
            if program == 0:
                tl.store(active + experts, tl.zeros((tile.experts,), tl.int1), mask=exists)
        if votes and routes:
            wait_for_all(arrivals, tile.programs)
        if routes:
            sources = tl.arange(0, tile.partials)
            offsets = sources[:, None] * tile.experts + experts[None, :]
            words = tl.sum(tl.load(partials + offsets, mask=(sources < tile.programs)[:, None], other=0, cache_modifier=".cg"), 0)

    if routes:
        selected = select_experts(words, recipe)
        saved = tl.zeros((), tl.int64)
        if recipe.rescue:
            selected, saved = rescue_rows(selected, own, rank)
        slots = cover_rows(keys, rank, own, kept, selected, experts, recipe)
        chosen = slots < recipe.columns
        weights = weigh(scores, own if recipe.coverage == "truncate" else chosen, recipe.renormalize)

        target = row[:, None] * recipe.columns + slots
        tl.store(topk_ids + target, tl.broadcast_to(experts[None, :], slots.shape), mask=chosen)
        tl.store(topk_weights + target, weights, mask=chosen)
        column = tl.arange(0, tile.columns)[None, :]
        gap = present[:, None] & (column < recipe.columns) & (column >= tl.sum(chosen.to(tl.int32), 1)[:, None])
        tl.store(topk_ids + row[:, None] * recipe.columns + column, -1, mask=gap)
        tl.store(topk_weights + row[:, None] * recipe.columns + column, 0.0, mask=gap)

        own_mass = tl.sum(tl.where(own, scores, 0), 1)
        mass = tl.div_rn(tl.sum(tl.where(chosen, scores, 0), 1), tl.where(own_mass > 0, own_mass, 1.0))
        mass = tl.where(live, tl.where(own_mass > 0, mass, 1.0), 0.0)
        tl.store(kept_mass + row, mass, mask=present)

        in_use = tl.max(chosen.to(tl.int32), 0) > 0
        if tile.programs == 1:
            tl.store(active + experts, in_use, mask=exists)
        else:
            tl.store(active + experts, in_use, mask=in_use)
        if program == 0:
            tl.store(selected_out + experts, selected, mask=exists)
            tl.store(vanilla_active + experts, (words & (HOLDER - 1)) >= VOTE, mask=exists)
            tl.store(rescued, saved)
