"""Device functions that sort the (row, slot) pairs of one program by expert; see `sglang_xshare.types.Alignment`.

For each expert, an integer has one bit for each row that chose the expert. The number of set bits is the number of the
expert's pairs. The number of set bits below a row's bit is the position of this row's pair. The higher bits of the
integer count the slots that the expert fills in rows with too few experts.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from ..alignment import BLOCK as BLOCK_SIZE
from .rows import INTERPRETED

BLOCK = tl.constexpr(BLOCK_SIZE)
MOST_ROWS = 16
"""The largest number of rows in a batch. Each row is one bit in the lower half of an int32. The upper half can count
all slots of these rows.
"""
MOST_PAIRS = 2048
"""The largest number of pairs. One int32 contains the bits of an expert's rows and the number of the expert's first
block. This number is at most MOST_PAIRS.
"""
ROWS, ONE = tl.constexpr(MOST_ROWS), tl.constexpr(1 << MOST_ROWS)
HEAD = tl.constexpr(BLOCK_SIZE)
"""The number of elements before the pairs in the buffer. The first is the total. The others keep pointers aligned."""
SPAN = tl.constexpr(512)
"""The number of elements that one store fills with padding."""


@triton.jit
def count_bits(x) -> tl.tensor:
    """Return the number of set bits in each element of `x` as int32. The elements are non-negative int32."""
    if INTERPRETED:  # the interpreter has no libdevice
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        x = ((x * 0x01010101) >> 24) & 0x7F
    else:
        x = libdevice.popc(x)
    return x


@triton.jit
def align_program(
    alignment, members, ids, filler, place, row, present, num_rows, experts, recipe: tl.constexpr, tile: tl.constexpr
) -> None:
    """Write the alignment of one program to `alignment`: the total, the pairs, and the expert of each block.

    `members` [R, E] marks the experts that each row chose. In `ids` [R, C] a row has its chosen experts first. Then
    every empty slot contains the row's `filler` [R]. The shared experts come last. `present` [R] marks the rows of the
    batch, including padding rows. Every present row has pairs in all columns.
    """
    slots: tl.constexpr = recipe.columns + recipe.shared
    numel = num_rows * slots
    pairs, block_experts = alignment + HEAD, alignment + HEAD + numel * BLOCK

    count = tl.sum(members.to(tl.int32), 1)
    empty = tl.where(present, recipe.columns - count, 0)
    fills = (experts[None, :] == filler[:, None]) & (empty > 0)[:, None]
    bits = tl.where(members, (1 << place)[:, None], 0) + tl.where(fills, (empty * ONE)[:, None], 0)
    bits = tl.sum(bits, 0)
    spare = bits >> ROWS
    blocks = (count_bits(bits & (ONE - 1)) + spare + (BLOCK - 1)) // BLOCK
    begins = tl.cumsum(blocks, 0) - blocks
    # One reduction computes two sums: the number of blocks, and the number of experts that fill slots or have several
    # blocks.
    sums = tl.sum(blocks + tl.where((spare > 0) | (blocks > 1), ONE, 0), 0)
    total, fills_slots = sums & (ONE - 1), sums >> ROWS
    end = (total + recipe.shared) * BLOCK
    tl.store(alignment, end)
    for start in range(0, end, SPAN):
        element = start + tl.arange(0, SPAN)
        tl.store(pairs + element, numel, mask=element < end)
    tl.store(block_experts + begins, experts, mask=blocks > 0)
    if fills_slots > 0:
        for block in range(1, tl.max(blocks, 0)):
            tl.store(block_experts + begins + block, experts, mask=block < blocks)

    column = tl.arange(0, tile.columns)[None, :]
    chosen, routed = column < count[:, None], column < recipe.columns
    index = tl.reshape(tl.where(routed & present[:, None], ids, 0), (tile.rows * tile.columns,))
    found = tl.gather((bits & (ONE - 1)) | (begins << ROWS), index, 0)
    found = tl.reshape(found, (tile.rows, tile.columns))
    # An expert's chosen pairs come first, in the order of rows, and then the slots that the expert fills.
    ahead = tl.where(chosen, (1 << place)[:, None], ONE) - 1
    target = (found >> ROWS) * BLOCK + count_bits(found & ahead)
    filled = tl.full((tile.rows,), 0, tl.int32)
    if fills_slots > 0:
        before = (filler[None, :] == filler[:, None]) & (place[None, :] < place[:, None])
        filled = tl.sum(tl.where(before, empty[None, :], 0), 1)
    target += tl.where(chosen, 0, (filled - count)[:, None] + column)
    if recipe.shared > 0:
        shared = column - recipe.columns
        target = tl.where(routed, target, (total + shared) * BLOCK + row[:, None])
        first = (shared >= 0) & (shared < recipe.shared) & (row == 0)[:, None] & present[:, None]
        block = tl.broadcast_to(total + shared, first.shape)
        tl.store(block_experts + block, tl.broadcast_to(recipe.num_experts + shared, first.shape), mask=first)
    # The barrier is needed because the pairs overwrite padding that other threads have stored.
    tl.debug_barrier()
    tl.store(pairs + target, row[:, None] * slots + column, mask=present[:, None] & (column < slots))
