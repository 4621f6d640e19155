"""Device functions on the slots of routed rows: filled, and sorted by expert for SGLang's Triton MoE runner."""

import triton
import triton.language as tl

NOTHING = tl.constexpr(2**31 - 1)
"""The sorting key of a place in the tile that is no slot."""


@triton.jit
def fill_rows(ids: tl.tensor, column: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """The ids [R, columns] int32 with the row's first in its empty slots.

    A row without any gets the largest first of the batch, or 0, where this program sees all rows; else -1.
    """
    first = tl.sum(tl.where(column == 0, ids, 0), 1)
    first = tl.where(first < tile.experts, first, -1)
    if tile.programs == 1:
        first = tl.where(first < 0, tl.maximum(tl.max(first, 0), 0), first)
    return tl.where(ids < tile.experts, ids, first[:, None])


@triton.jit
def _larger(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.maximum(a, b)


@triton.jit
def align_slots(
    ids: tl.tensor,  # [R, columns] int32, an expert in every slot
    slot: tl.tensor,  # [R, columns] int32: its number, row by row
    there: tl.tensor,  # [R, columns] bool: False where the tile is larger than the batch
    sorted_slots: tl.tensor,
    block_experts: tl.tensor,
    num_sorted: tl.tensor,
    num_slots: tl.tensor,
    num_blocks: tl.tensor,
    recipe: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write an `Alignment`: by expert, then by slot. One program sorts all slots, and no expert is counted."""
    size: tl.constexpr = tile.slots
    block_size: tl.constexpr = recipe.block_size
    keys = tl.sort(tl.reshape(tl.where(there, ids * size + slot, NOTHING), (size,)))
    there = keys < NOTHING
    expert = keys // size
    place = tl.arange(0, size)
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
    sorted_slots: tl.tensor,
    block_experts: tl.tensor,
    num_sorted: tl.tensor,
    num_rows: tl.tensor,
    num_blocks: tl.tensor,
    recipe: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """What is left to one program once several have routed their rows: rows without experts, and the alignment.

    A kernel of its own where programs cannot wait for each other.
    """
    row = tl.arange(0, tile.all_rows)
    first = tl.load(topk_ids + row * recipe.columns, mask=row < num_rows, other=-1)
    awake = tl.maximum(tl.max(first, 0), 0)
    column = tl.arange(0, tile.columns)[None, :]
    slot = row[:, None] * recipe.columns + column
    there = (row < num_rows)[:, None] & (column < recipe.columns)
    bare = (first < 0)[:, None]
    tl.store(topk_ids + slot, awake, mask=there & bare)
    if recipe.block_size:
        ids = tl.where(bare, awake, tl.load(topk_ids + slot, mask=there & ~bare, other=0))
        align_slots(
            ids,
            slot,
            there,
            sorted_slots,
            block_experts,
            num_sorted,
            num_rows * recipe.columns,
            num_blocks,
            recipe,
            tile,
        )
