"""Device functions that sort the (row, slot) pairs of one program by expert: see `sglang_xshare.types.Alignment`.

An expert's rows are bits of one integer, so that population counts give both how many pairs it has and where each pair
goes. Above the rows' bits the same integer counts the slots that the expert fills in rows with too few experts.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..alignment import BLOCK as BLOCK_SIZE
from .rows import INTERPRETED, halve

BLOCK = tl.constexpr(BLOCK_SIZE)
MOST_ROWS = 16
"""Bits of an expert's rows; beside them an int32 has room for all slots of so many rows."""
MOST_PAIRS = 2048
"""A pair's place, up to 16 times as large, and its value share an int32."""
ROWS, ONE = tl.constexpr(MOST_ROWS), tl.constexpr(1 << MOST_ROWS)
HEAD = tl.constexpr(BLOCK_SIZE)
"""Elements before the pairs in the buffer: the total, and a gap so that the runner's pointers stay aligned."""
SPAN = tl.constexpr(512)
"""Elements that are padded at a time."""


@triton.jit
def count_bits(x) -> tl.tensor:
    """int32: the bits that are set in each non-negative int32 `x`."""
    if INTERPRETED:  # which has no libdevice
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        x = ((x * 0x01010101) >> 24) & 0x7F
    else:
        x = libdevice.popc(x)
    return x


@triton.jit
def store_pairs(pairs, packed, start: tl.constexpr) -> None:
    """Store the pairs of `packed` [R, width], a pair's value above the 16 bits of its place; -1 is no pair.

    The columns are halved and flattened as `cover.store_places` does, for the same reason.
    """
    width: tl.constexpr = packed.shape[1]
    if width > 32:
        left, right = halve(packed)
        store_pairs(pairs, left, start)
        store_pairs(pairs, right, start + width // 2)
    else:
        flat = tl.reshape(packed, (packed.shape[0] * width,))
        tl.store(pairs + (flat & 0xFFFF), flat >> 16, mask=flat >= 0)


@triton.jit
def align_program(
    alignment, slot, chosen, filler, place, row, present, num_rows, experts, recipe: tl.constexpr, tile: tl.constexpr
) -> None:
    """Write the alignment of one program's ids behind `alignment`: the total, the pairs, the blocks' experts.

    `slot` [R, E] is where a `chosen` [R, E] expert stands in its row. A row's other columns hold its `filler` [R], then
    the shared experts. `present` [R] rows have all columns, padding rows too.
    """
    slots: tl.constexpr = recipe.columns + recipe.shared
    numel = num_rows * slots
    pairs, blocks_out = alignment + HEAD, alignment + HEAD + numel * BLOCK

    count = tl.sum(chosen.to(tl.int32), 1)
    empty = tl.where(present, recipe.columns - count, 0)
    fills = (experts[None, :] == filler[:, None]) & (empty > 0)[:, None]
    bits = tl.where(chosen, (1 << place)[:, None], 0) + tl.where(fills, (empty * ONE)[:, None], 0)
    bits = tl.sum(bits, 0)
    members, spare = bits & 0xFFFF, bits >> ROWS
    blocks = (count_bits(members) + spare + (BLOCK - 1)) // BLOCK
    ends = tl.cumsum(blocks, 0)
    begins = ends - blocks
    # One reduction for two sums: the blocks, and the experts that are not just one block of chosen pairs.
    sums = tl.sum(blocks + tl.where((spare > 0) | (blocks > 1), ONE, 0), 0)
    total, fills_slots = sums & 0xFFFF, sums >> ROWS
    end = (total + recipe.shared) * BLOCK
    tl.store(alignment, end)

    for start in range(0, end, SPAN):
        element = start + tl.arange(0, SPAN)
        tl.store(pairs + element, numel, mask=element < end)
    tl.store(blocks_out + begins, experts, mask=blocks > 0)
    if fills_slots > 0:
        for block in range(1, tl.max(blocks, 0)):
            tl.store(blocks_out + begins + block, experts, mask=block < blocks)
    # Other threads store the pairs on top of the padding.
    tl.debug_barrier()

    lower = ((1 << place) - 1)[:, None]
    # Together, since each would be laid out anew for all rows.
    both = (members | (begins << ROWS))[None, :]
    target = (both >> ROWS) * BLOCK + count_bits(both & lower)
    value = row[:, None] * slots + slot
    store_pairs(pairs, tl.where(chosen, (value << 16) | target, -1), 0)

    column = tl.arange(0, tile.columns)[None, :]
    value = row[:, None] * slots + column
    if fills_slots > 0:
        # An expert's chosen pairs, then the slots that it fills in rows before this one.
        used = tl.sum(tl.where(fills, (both >> ROWS) * BLOCK + count_bits(both & (ONE - 1)), 0), 1)
        before = (filler[None, :] == filler[:, None]) & (place[None, :] < place[:, None])
        used += tl.sum(tl.where(before, empty[None, :], 0), 1)
        filled = (empty[:, None] > 0) & (column >= count[:, None]) & (column < recipe.columns)
        tl.store(pairs + (used - count)[:, None] + column, value, mask=filled)
    if recipe.shared > 0:
        shared = column - recipe.columns
        inside = present[:, None] & (shared >= 0) & (shared < recipe.shared)
        block = tl.broadcast_to(total + shared, inside.shape)
        tl.store(pairs + block * BLOCK + row[:, None], value, mask=inside)
        expert = tl.broadcast_to(recipe.num_experts + shared, inside.shape)
        tl.store(blocks_out + block, expert, mask=inside & (row == 0)[:, None])
