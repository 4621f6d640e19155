"""The fused selection kernel: from router logits to ids, weights and the active set, in one launch.

    logits [n, N] -> P [R, E] fp32, C [R, E] int32 keys   a tile of R rows for each program, each row in one warp
        -> kept, own [R, E] bool                          rounds of `take_best` over C: each row's warm-up and top-k
        -> counters [E] int64                             utility, votes and holders of every expert, over the rows
        ~> the sum of the programs' counters              only with several programs: stored, a grid barrier, loaded
        -> S [E] bool                                     select: in every program, from the same counters
        -> keys, experts [R, columns]                     cover: rounds of `take_best` over C within S
        -> topk_ids, topk_weights [n, columns]            the scores are computed from the keys
        -> alignment                                      the pairs sorted by expert, if the MoE runner needs them

All sums across rows are sums of integers. The order of rows and the number of programs therefore do not change the
result.

A small batch runs in one program, so no data leaves the SM between logits and ids. A larger batch would keep one SM
busy for too long. Its rows are therefore spread over several programs, which exchange their counters at a grid barrier.
If the most confident rows vote, there is one more barrier. If rows may need a rescue, there is another one. If not all
programs can be resident at the same time, there are several launches instead of barriers. Each later launch repeats the
earlier work on its rows, because this is cheaper than storing the results.

The kernel finds the best experts by repeated maxima instead of a sort. The top-k is about 8. A round costs one `redux`
and about 20 other instructions for each row, but a bitonic sort of 128 experts would take 28 exchanges.
"""

import triton
import triton.language as tl

from .alignment import align_program
from .barrier import wait_for_all
from .budgets import WARM_ROWS, read_chance, read_count
from .cover import find_filler, find_lost, limit_keys, list_usable, score_listed, settle_spare, weigh
from .experts import find_voted, read_utility, select_experts, sum_counters
from .ranking import choose_keys, collect_counters, rank_rows
from .rows import EMPTY, find_best, find_largest, flatten, load_listed, load_tile, score_logits, store_tile
from .voters import find_voters, follow_voters, measure_confidence

MEASURE, COLLECT, RESCUE, ROUTE = (tl.constexpr(phase) for phase in range(4))
"""The phases in their order. Within one launch, barriers separate the phases. If barriers are not possible, each phase
is a launch of its own. It repeats the work of the earlier phases.
"""
TABLES = ["selected_out", "active", "vanilla_active", "kept_mass", "rescued"]


# The row stride is not specialized. If it were known to be aligned, a thread would load several neighboring elements,
# although rows share a warp. The alignment of the tensors must not select another kernel either, because each element
# is loaded and stored by itself.
@triton.jit(
    do_not_specialize=["num_rows", "row_stride", "num_resident"],
    do_not_specialize_on_alignment=[
        "logits",
        "valid",
        "exact",
        "resident",
        "depth",
        "bias",
        "expert_scale",
        "topk_ids",
        "topk_weights",
        "masked",
        "alignment",
        *TABLES,
    ],
)
def select_kernel(
    logits: tl.tensor,  # [n, N] fp32, fp16 or bf16; the experts of a row are contiguous
    valid: tl.tensor,  # [n] bool, or None
    exact: tl.tensor,  # [n] bool, or None
    resident: tl.tensor,  # [N] bool, or None
    depth: tl.tensor,  # [n] int32, or None
    bias: tl.tensor,  # [N] float, or None
    expert_scale: tl.tensor,  # [N] float, or None
    ranks: tl.tensor,  # [N] int, or None
    budgets: tl.tensor,  # `Budgets.values`
    partials: tl.tensor,  # [3, programs, E] int64, or [1, ...]: scratch memory if there are several programs
    confidences: tl.tensor,  # [n] int64: scratch memory if the most confident rows vote
    arrivals: tl.tensor,  # [1] int32: the counter of the barrier
    topk_ids: tl.tensor,  # [n, columns] int32, including the columns of shared experts
    topk_weights: tl.tensor,  # [n, columns] fp32
    masked: tl.tensor,  # [n, N] in the dtype of the logits, or None
    alignment: tl.tensor,  # int32: the total, the pairs, the expert of each block (`launch.divide`); or None
    selected_out: tl.tensor,  # [N] bool
    active: tl.tensor,  # [N] bool
    vanilla_active: tl.tensor,  # [N] bool
    kept_mass: tl.tensor,  # [n] fp32
    rescued: tl.tensor,  # [] int64
    num_rows: tl.tensor,
    row_stride: tl.tensor,
    num_resident: tl.tensor,  # the number of page slots, or None
    recipe: tl.constexpr,
    tile: tl.constexpr,
    begins: tl.constexpr,  # the first phase of this launch
    ends: tl.constexpr,  # the last phase of this launch
) -> None:
    program, programs = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, tile.experts)
    exists = experts < recipe.num_experts
    # In the tile the rows of a request are padded to a power of two.
    place = tl.arange(0, tile.rows)
    request = program * (tile.rows // tile.request) + place // tile.request
    row = request * recipe.tokens_per_request + place % tile.request
    present = (place % tile.request < recipe.tokens_per_request) & (row < num_rows)
    live = present
    if valid is not None:
        live &= tl.load(valid + row, mask=present, other=0) != 0
    exempt = live
    if exact is not None:
        exempt = live & (tl.load(exact + row, mask=present, other=0) != 0)

    logits_of_row = logits + row.to(tl.int64) * row_stride
    rows = load_tile(logits_of_row, live, recipe.num_experts, float("-inf"), 0, tile.experts)
    rows = rows.to(tl.float32)
    rows = tl.where(tl.abs(rows) < float("inf"), rows, float("-inf"))
    largest, total = find_largest(rows), tl.full((tile.rows, 1), 1.0, tl.float32)
    scores = score_logits(rows, largest, recipe)
    if recipe.normalize:
        total = tl.sum(scores, 1)[:, None]
        total = tl.where(total > 0, total, 1.0)
        scores = tl.div_rn(scores, total)
    keys = choose_keys(rows, scores, bias, experts, recipe)
    kept, own, own_best, own_expert = rank_rows(keys, scores, experts, budgets, recipe, tile)
    chance = None
    if depth is not None:
        deep = tl.load(depth + row, mask=present, other=0)
        if recipe.warms_some:
            kept &= (deep < read_count(budgets, WARM_ROWS))[:, None]
        if recipe.weighs:
            chance = read_chance(budgets, deep)
    if recipe.exact:
        kept |= own & exempt[:, None]
    waits: tl.constexpr = tile.several and begins < ends
    partial = program * tile.experts + experts
    plane = programs * tile.experts

    if recipe.follows_voters:
        confident = live & ~exempt if recipe.exact else live
        confidence = measure_confidence(scores, confident, budgets, recipe)
        if begins <= MEASURE:
            tl.store(confidences + row, confidence, mask=present)
        if waits:
            wait_for_all(arrivals, programs)
        elif not tile.several:
            tl.debug_barrier()
    free = exists
    if recipe.residents:
        free = tl.load(resident + experts, mask=exists, other=0) != 0
    if ends >= COLLECT:
        held = kept
        if recipe.follows_voters:
            voter = find_voters(confidence, row, confidences, num_rows, budgets)[:, None]
            held |= voter & find_best(keys, experts, 1, recipe.unique_keys)
            ballots = tl.sum((voter & own).to(tl.int32), 0).to(tl.int64)
        counters = collect_counters(scores, held, own, exempt, free, chance, experts, budgets, recipe, tile)
        if recipe.sets_aside:
            ballots = tl.sum((own & exempt[:, None]).to(tl.int32), 0).to(tl.int64)
        if begins <= COLLECT:
            if program == 0:
                tl.store(active + experts, 0, mask=exists)
            if tile.several:
                tl.store(partials + partial, counters)
                if recipe.follows_voters or recipe.sets_aside:
                    tl.store(partials + plane + partial, ballots)
        if waits:
            wait_for_all(arrivals, programs)
    if ends >= RESCUE:
        if tile.several:
            counters = sum_counters(partials, programs, tile)
            if recipe.follows_voters or recipe.sets_aside:
                ballots = sum_counters(partials + plane, programs, tile)
        rank = None
        if recipe.balance is not None:
            rank = tl.load(ranks + experts, mask=exists, other=-1).to(tl.int32)
        aside = counters < 0
        if recipe.sets_aside:
            aside = ballots > 0
        selected = select_experts(counters, aside, free, num_resident, rank, budgets, recipe)
        if recipe.follows_voters:
            selected = follow_voters(ballots, read_utility(counters), selected, budgets, recipe)
        saved = tl.full((), 0, tl.int64)
        if recipe.rescue:
            lost = find_lost(keys, own, selected, experts, recipe)
            if tile.several and begins <= RESCUE:
                tl.store(partials + 2 * plane + partial, lost)
            if waits:
                wait_for_all(arrivals, programs)
            if tile.several and ends == ROUTE:
                lost = sum_counters(partials + 2 * plane, programs, tile)
            selected |= lost > 0
            saved = tl.sum(lost, 0)
    if ends == ROUTE:
        first = place + program == 0
        nowhere = place * 0
        store_tile(selected_out + nowhere, tl.broadcast_to(selected[None, :], keys.shape), first, recipe.num_experts, 0)
        voted = find_voted(counters, recipe)
        store_tile(vanilla_active + nowhere, tl.broadcast_to(voted[None, :], keys.shape), first, recipe.num_experts, 0)
        if program == 0:
            tl.store(rescued, saved)

        usable = limit_keys(keys, kept, own, exempt, selected, experts, budgets, recipe)
        used, best, expert = list_usable(usable, exempt, experts, recipe, tile)
        column = tl.arange(0, tile.columns)[None, :]
        chosen = best > EMPTY
        own_scores = score_listed(own_best, own_expert, logits_of_row, largest, total, exempt, recipe, tile)
        chosen_scores = score_listed(best, expert, logits_of_row, largest, total, exempt, recipe, tile)
        own_mass, mass = tl.sum(own_scores, 1), tl.sum(chosen_scores, 1)
        weights = weigh(chosen_scores, own_best > EMPTY, own_mass, chosen, mass, budgets, recipe)
        if expert_scale is not None:
            weights *= load_listed(expert_scale + expert, chosen)
        weights = tl.where(chosen, weights, 0.0)
        # This barrier is needed because other threads of the program may have stored the zeros of `active`. The zeros
        # of another program were stored before the grid barrier.
        tl.debug_barrier()
        tl.store(flatten(active + expert), 1, mask=flatten(chosen))

        filler = tl.full((tile.rows,), -1, tl.int32)
        if recipe.fill:
            filler = tl.max(tl.where(chosen & (column == 0), expert, -1), 1)
            common = find_filler(counters, selected, active, arrivals, experts, recipe, tile)
            filler = tl.where(filler < 0, common, filler)
        expert = tl.where(chosen, expert, filler[:, None])
        if recipe.shared:
            shared = column - recipe.columns
            expert = tl.where(shared < 0, expert, recipe.num_experts + shared)
            weights = tl.where(shared < 0, weights, recipe.shared_weight)
        slots: tl.constexpr = recipe.columns + recipe.shared
        slot = row[:, None] * slots + column
        taken = present[:, None] & (column < slots)
        tl.store(topk_ids + slot, expert, mask=taken)
        tl.store(topk_weights + slot, weights, mask=taken)
        if masked is not None:
            spare = settle_spare(counters, selected, active, arrivals, experts, recipe, tile)
            raw = load_tile(logits_of_row, live, recipe.num_experts, 0, 0, tile.experts)
            rest = tl.where(spare, recipe.lowest, float("-inf")).to(raw.dtype)
            raw = tl.where(used, raw, rest[None, :])
            store_tile(masked + row.to(tl.int64) * recipe.num_experts, raw, present, recipe.num_experts, 0)
        share = mass / tl.where(own_mass > 0, own_mass, 1.0)
        share = tl.where((mass == own_mass) | (own_mass <= 0) | (share == float("inf")), 1.0, share)
        share = tl.where(live, share, 0.0)[:, None]
        once = present[:, None] & (column == 0)
        tl.store(kept_mass + (row[:, None] + column), tl.broadcast_to(share, slot.shape), mask=once)
        if alignment is not None:
            align_program(alignment, used, expert, filler, place, row, present, num_rows, experts, recipe, tile)
