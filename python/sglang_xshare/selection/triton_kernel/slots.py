"""Device functions on the slots of routed rows: filled, and sorted by expert for SGLang's Triton MoE runner."""

import triton
import triton.language as tl

from .cover import load_filler

NOTHING = tl.constexpr(2**31 - 1)
"""The sorting key of a place in the tile that is no slot."""


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b)


@triton.jit
def align_slots(
    topk_ids: tl.tensor,  # [n, columns] int32, an expert in every slot
    sorted_slots: tl.tensor,
    block_experts: tl.tensor,
    num_sorted: tl.tensor,
    num_rows: tl.tensor,
    num_blocks: tl.tensor,
    recipe: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write an `Alignment`: by expert, then by slot. One program sorts all slots, and no expert is counted."""
    size: tl.constexpr = tile.slots
    block_size: tl.constexpr = recipe.block_size
    num_slots = num_rows * recipe.columns
    place = tl.arange(0, size)
    ids = tl.load(topk_ids + place, mask=place < num_slots, other=0)
    keys = tl.sort(tl.where(place < num_slots, ids * size + place, NOTHING))
    there = keys < NOTHING
    expert = keys // size
    is_first = (place == 0) | (expert != tl.gather(expert, tl.maximum(place - 1, 0), 0))
    in_block = (place - tl.associative_scan(tl.where(is_first, place, 0), 0, _larger)) % block_size
    opens = there & (in_block == 0)
    block = tl.cumsum(opens.to(tl.int32), 0) - 1
    position = tl.arange(0, tile.positions)
    tl.store(sorted_slots + position, num_slots, mask=position < num_blocks * block_size)
    tl.debug_barrier()  # other threads of this program write over it
    there &= block < num_blocks
    tl.store(sorted_slots + block * block_size + in_block, keys % size, mask=there)
    tl.store(block_experts + block, expert, mask=opens & there)
    tl.store(num_sorted, tl.sum(opens.to(tl.int32), 0) * block_size)


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])
def finish_slots(
    topk_ids: tl.tensor,
    selected: tl.tensor,
    active: tl.tensor,
    vanilla_active: tl.tensor,
    sorted_slots: tl.tensor,
    block_experts: tl.tensor,
    num_sorted: tl.tensor,
    num_rows: tl.tensor,
    num_blocks: tl.tensor,
    recipe: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Where programs cannot wait for each other, what is left once they have routed their rows: to fill rows without
    experts, and to align.
    """
    experts = tl.arange(0, tile.experts)
    exists = experts < recipe.num_experts
    s = tl.load(selected + experts, mask=exists, other=0) != 0
    voted = tl.load(vanilla_active + experts, mask=exists, other=0) != 0
    filler = load_filler(s, voted, active, experts, recipe.num_experts)
    place = tl.arange(0, 32)
    column = tl.arange(0, tile.columns)[None, :]
    for start in range(0, num_rows, 32):
        row = start + place
        rows = topk_ids + row * (recipe.columns + recipe.shared)
        first = tl.load(rows, mask=row < num_rows, other=0)
        tl.debug_barrier()  # other threads of this program read what is written now
        bare = (first < 0)[:, None] & (column < recipe.columns)
        tl.store(rows[:, None] + column, filler, mask=bare)
    if recipe.block_size:
        tl.debug_barrier()
        align_slots(topk_ids, sorted_slots, block_experts, num_sorted, num_rows, num_blocks, recipe, tile)
