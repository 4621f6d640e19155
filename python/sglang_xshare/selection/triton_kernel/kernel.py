"""The fused selection kernel: from router logits to ids, weights and the active set, in one launch.

    logits [n, N] -> P [R, E] fp32, C [R, E] int32 keys   a tile of R rows a program, a row in one warp
        -> kept, own [R, E] bool                          rounds of `pop_best` over C: the row's warm-up, its top-k
        -> words [E] int64                                utility, votes and holders of every expert, over the rows
        ~> the sum of the programs' words                 of several programs: stored, a grid barrier, loaded
        -> S [E] bool                                     in every program, from the same words
        -> topk_ids, topk_weights [n, columns]            rounds of `pop_best` over C within S
        ~> slots sorted by expert                         where asked for, by the program that routed its rows last

All sums across rows are of integers, so neither the order of rows nor the number of programs changes a bit.

A small batch is one program: nothing leaves its SM between logits and ids. A larger one would keep an SM busy for too
long, so its rows are spread over programs that exchange their words once. Where not all of them can be resident, the
barrier becomes the border between two launches, and the second repeats what the first found of its rows: cheaper than
storing it.

Rounds of a maximum rather than a sort: k is about 8, and a round costs a row two `redux` and some 30 other
instructions, where a bitonic sort of 128 experts takes 28 exchanges.
"""

import triton
import triton.language as tl

from .experts import HOLDER, VOTE, is_last, select_experts, wait_for_all
from .rows import EMPTY, drop_best, limit_groups, load_tile, make_unique, pop_best, score_rows, to_grid, to_keys
from .slots import align_slots, fill_rows, finish_slots
from .voters import find_voters, follow_voters


@triton.jit
def choose_keys(
    logits: tl.tensor, scores: tl.tensor, bias: tl.tensor, experts: tl.tensor, recipe: tl.constexpr
) -> tl.tensor:
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
def keep_share(
    keys: tl.tensor, scores: tl.tensor, experts: tl.tensor, recipe: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(the shortest warm-up of up to k0 experts with a share p of the row [R, E] bool; the keys below the k0 best)."""
    grid = to_grid(scores, 1048576.0)
    reach = tl.ceil(tl.sum(grid, 1).to(tl.float64) * recipe.p)
    share = tl.full((keys.shape[0],), 0, tl.int32)
    kept = keys < EMPTY
    for turn in range(recipe.k0):
        _, hit, keys = pop_best(keys, experts, recipe.unique_keys)
        kept |= hit & ((turn == 0) | (share.to(tl.float64) < reach))[:, None]
        share += tl.sum(tl.where(hit, grid, 0), 1)
    return kept, keys


@triton.jit
def find_first(keys: tl.tensor, experts: tl.tensor, recipe: tl.constexpr) -> tl.tensor:
    """[R, E] bool: each row's first choice."""
    return keys > drop_best(keys, experts, 1, recipe.unique_keys)


@triton.jit
def rank_rows(
    keys: tl.tensor, scores: tl.tensor, experts: tl.tensor, recipe: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(each row's warm-up or what dynamic-skip leaves; its top-k): [R, E] bool."""
    if recipe.p < 1:
        kept, rest = keep_share(keys, scores, experts, recipe)
    else:
        rest = drop_best(keys, experts, recipe.k0, recipe.unique_keys)
        kept = keys > rest
    own = keys > drop_best(rest, experts, recipe.top_k - recipe.k0, recipe.unique_keys)
    if recipe.beta is not None:
        first = find_first(keys, experts, recipe)
        floor = tl.max(tl.where(first, scores, 0), 1).to(tl.float64) * recipe.beta
        kept &= first | (scores.to(tl.float64) >= floor[:, None])
    return kept, own


@triton.jit
def share_scores(scores: tl.tensor, recipe: tl.constexpr) -> tl.tensor:
    """[R, E] int32: the scores over their sum in the row, in multiples of 2^-20."""
    # Summed as integers, in proportion to the largest: exact, so that equal scores in any order have equal shares.
    if recipe.biased or recipe.sigmoid or recipe.normalize:
        largest = tl.max(scores.to(tl.int32, bitcast=True), 1).to(tl.float32, bitcast=True)
        scores = tl.div_rn(scores, tl.where(largest > 0, largest, 1.0)[:, None])
    total = tl.sum((scores * 67108864.0 + 0.5).to(tl.int32), 1)  # 2^26
    scale = 70368744177664.0 / tl.maximum(total, 1).to(tl.float32)  # 2^46
    return to_grid(scores, scale[:, None])


@triton.jit
def collect_words(
    scores: tl.tensor, kept: tl.tensor, own: tl.tensor, experts: tl.tensor, recipe: tl.constexpr, tile: tl.constexpr
) -> tl.tensor:
    """What the tile's rows say about every expert: [E] int64, see experts.py."""
    utility = to_grid(scores, 1048576.0) if recipe.utility_full else share_scores(tl.where(own, scores, 0), recipe)
    standing = own.to(tl.int32) | (kept.to(tl.int32) << 16)
    words = tl.sum((standing.to(tl.int64) << 32) | utility.to(tl.int64), 0)
    if recipe.add_per_request > 0:
        requests: tl.constexpr = (tile.rows // tile.request, tile.request, tile.experts)
        wish = tl.sum(tl.reshape(utility, requests), 1)
        warm = tl.max(tl.reshape(kept.to(tl.int32), requests), 1)
        wish = tl.where((wish > 0) & (warm == 0), wish, EMPTY)
        granted = wish > drop_best(wish, experts, recipe.add_per_request, False)
        words += tl.sum(granted.to(tl.int64), 0) * HOLDER
    return words


@triton.jit
def rescue_rows(
    keys: tl.tensor, own: tl.tensor, selected: tl.tensor, experts: tl.tensor, recipe: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(S with the first choice of every row that has none of its top-k in S; the number of such rows)."""
    lost = tl.max((own & selected[None, :]).to(tl.int32), 1) == 0
    saved = (lost[:, None] & find_first(keys, experts, recipe)).to(tl.int32)
    return selected | (tl.max(saved, 0) > 0), tl.sum(tl.sum(saved, 1), 0).to(tl.int64)


@triton.jit
def limit_keys(
    keys: tl.tensor, kept: tl.tensor, own: tl.tensor, selected: tl.tensor, experts: tl.tensor, recipe: tl.constexpr
) -> tl.tensor:
    """The keys [R, E] of the experts that the plan's coverage lets each row use, EMPTY elsewhere."""
    if recipe.coverage == "own":
        usable = kept
    elif recipe.coverage == "truncate":
        usable = own & selected[None, :]
    elif recipe.reach is not None:
        reach = keys > drop_best(keys, experts, recipe.reach, recipe.unique_keys)
        usable = kept | (reach & selected[None, :])
    else:
        usable = selected[None, :]
    return tl.where(usable, keys, EMPTY)


@triton.jit
def cover_rows(
    keys: tl.tensor, scores: tl.tensor, experts: tl.tensor, recipe: tl.constexpr, tile: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(each row's experts, best first [R, columns] int32, E in empty slots; their scores fp32; the keys not used)."""
    column = tl.arange(0, tile.columns)[None, :]
    ids = tl.full((tile.rows, tile.columns), tile.experts, tl.int32)
    # Scores are not negative, so that their bits are in their order, and one `redux` finds the one that was hit.
    bits = scores.to(tl.int32, bitcast=True)
    chosen = tl.full((tile.rows, tile.columns), 0, tl.int32)
    for slot in range(recipe.columns):
        best, hit, keys = pop_best(keys, experts, recipe.unique_keys)
        ids = tl.where(column == slot, best[:, None], ids)
        chosen = tl.where(column == slot, tl.max(tl.where(hit, bits, 0), 1)[:, None], chosen)
    return ids, chosen.to(tl.float32, bitcast=True), keys


@triton.jit
def weigh(chosen: tl.tensor, filled: tl.tensor, shared_mass: tl.tensor, shared: tl.tensor) -> tl.tensor:
    """Weights [R, columns] fp32: the chosen scores over the row's `shared_mass`; equal shares where that is 0."""
    scale = 1.0 / tl.where(shared_mass > 0, shared_mass, 1.0)
    share = 1.0 / tl.maximum(tl.sum(shared.to(tl.int32), 1), 1).to(tl.float32)
    return tl.where(filled & (shared_mass <= 0)[:, None], share[:, None], chosen * scale[:, None])


# A row stride known to be aligned would have a thread load several neighbours, and rows share a warp.
@triton.jit(do_not_specialize=["num_rows", "row_stride", "num_blocks"])
def select_kernel(
    logits: tl.tensor,  # [n, N] fp32, fp16 or bf16; the experts of a row are contiguous
    valid: tl.tensor,  # [n] bool, or None
    bias: tl.tensor,  # [N] float, or None
    ranks: tl.tensor,  # [N] int, or None
    partials: tl.tensor,  # [programs, E] int64: scratch of several programs
    arrivals: tl.tensor,  # [2] int32: the counters of the barrier, and of the programs that are done
    topk_ids: tl.tensor,  # [n, columns] int32
    topk_weights: tl.tensor,  # [n, columns] fp32
    selected_out: tl.tensor,  # [N] bool
    active: tl.tensor,  # [N] bool
    vanilla_active: tl.tensor,  # [N] bool
    kept_mass: tl.tensor,  # [n] fp32
    rescued: tl.tensor,  # [] int64
    sorted_slots: tl.tensor,  # an `Alignment`, or None
    block_experts: tl.tensor,
    num_sorted: tl.tensor,
    num_rows: tl.tensor,
    row_stride: tl.tensor,
    num_blocks: tl.tensor,
    recipe: tl.constexpr,
    tile: tl.constexpr,
    votes: tl.constexpr,  # whether this launch does what comes before the barrier
    routes: tl.constexpr,  # and what comes after
) -> None:
    program = tl.program_id(0)
    experts = tl.arange(0, tile.experts)
    exists = experts < recipe.num_experts
    # In the tile, the rows of a request are padded to a power of two.
    place = tl.arange(0, tile.rows)
    request = program * (tile.rows // tile.request) + place // tile.request
    row = request * recipe.tokens_per_request + place % tile.request
    present = (place % tile.request < recipe.tokens_per_request) & (row < num_rows)
    live = present
    if valid is not None:
        live &= tl.load(valid + row, mask=present, other=0) != 0

    rows = load_tile(logits + row.to(tl.int64) * row_stride, live, recipe.num_experts, float("-inf"), 0, tile.experts)
    rows = rows.to(tl.float32)
    rows = tl.where(tl.abs(rows) < float("inf"), rows, float("-inf"))
    scores = score_rows(rows, recipe.sigmoid, recipe.normalize)
    keys = choose_keys(rows, scores, bias, experts, recipe)
    kept, own = rank_rows(keys, scores, experts, recipe)
    held = kept
    if recipe.confidence is not None:
        voter = find_voters(scores, live, recipe, tile)[:, None]
        held |= voter & find_first(keys, experts, recipe)
    words = collect_words(scores, held, own, experts, recipe, tile)

    if votes and program == 0:
        tl.store(active + experts, 0, mask=exists)
    if tile.programs > 1:
        if votes:
            tl.store(partials + program * tile.experts + experts, words)
        if votes and routes:
            wait_for_all(arrivals, tile.programs)
        if routes:
            source = tl.arange(0, tile.partials)
            sources = partials + source * tile.experts
            words = tl.sum(load_tile(sources, source < tile.programs, tile.experts, 0, 0, tile.experts), 0)

    if routes:
        rank = None
        if recipe.target_per_rank is not None:
            rank = tl.load(ranks + experts, mask=exists, other=-1).to(tl.int32)
        selected = select_experts(words, rank, recipe, tile)
        if recipe.confidence is not None:
            ballots = tl.sum((voter & own).to(tl.int32), 0)
            selected = follow_voters(ballots, words & (VOTE - 1), selected, recipe, tile)
        saved = tl.full((), 0, tl.int64)
        if recipe.rescue:
            selected, saved = rescue_rows(keys, own, selected, experts, recipe)
        usable = limit_keys(keys, kept, own, selected, experts, recipe)
        ids, weights, rest = cover_rows(usable, scores, experts, recipe, tile)
        filled = ids < tile.experts
        own_mass = tl.sum(tl.where(own, scores, 0), 1)
        mass = tl.sum(tl.where(usable > rest, scores, 0), 1)
        if recipe.renormalize and recipe.coverage == "truncate":
            weights = weigh(weights, filled, own_mass, own)
        elif recipe.renormalize:
            weights = weigh(weights, filled, mass, filled)
        if recipe.scaling != 1.0:
            weights *= recipe.scaling

        column = tl.arange(0, tile.columns)[None, :]
        target = row[:, None] * recipe.columns + column
        inside = present[:, None] & (column < recipe.columns)
        taken = fill_rows(ids, column, tile) if recipe.fill else tl.where(filled, ids, -1)
        tl.store(topk_ids + target, taken, mask=inside)
        tl.store(topk_weights + target, weights, mask=inside)
        share = tl.where(own_mass > 0, tl.div_rn(mass, tl.where(own_mass > 0, own_mass, 1.0)), 1.0)
        share = tl.where(share < float("inf"), share, 1.0)
        tl.store(kept_mass + row, tl.where(live, share, 0.0), mask=present)
        # On top of the zeros stored above, by other threads of this program or before the barrier of all.
        tl.debug_barrier()
        tl.store(active + ids, 1, mask=filled)
        if program == 0:
            tl.store(selected_out + experts, selected, mask=exists)
            tl.store(vanilla_active + experts, (words & (HOLDER - 1)) >= VOTE, mask=exists)
            tl.store(rescued, saved)
        if recipe.block_size and tile.programs == 1:
            slots = num_rows * recipe.columns
            align_slots(taken, target, inside, sorted_slots, block_experts, num_sorted, slots, num_blocks, recipe, tile)
        if votes and recipe.fill and tile.programs > 1:
            last = is_last(arrivals + 1, tile.programs)
            if last:
                finish_slots(topk_ids, sorted_slots, block_experts, num_sorted, num_rows, num_blocks, recipe, tile)
