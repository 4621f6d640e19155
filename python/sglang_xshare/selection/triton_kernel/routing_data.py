"""The routing arrays that the matmul of triton_kernels reads, built from ids and weights in one launch.

The function `routing()` that SGLang calls derives the arrays from logits in nine launches. After a selection the ids
are known. Only two parts remain: a stable sort of the (row, slot) pairs by expert, and a table of blocks.

The launch has two programs, which do not need each other's results. The first program sorts the pairs, and the second
program builds the tables.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import cdiv

from .recipe import OPTIONS

BLOCK_SIZES = (16, 32, 64, 128)
"""The number of rows in a block, for each schedule. On CUDA these are `RaggedTensorMetadata.block_sizes()` of
triton_kernels.
"""
MAX_PAIRS = 128
"""The largest number of (row, slot) pairs in a batch: 32 rows of gpt-oss. The sort compares all pairs with each other.
"""
SMALL = 64
WARPS = 4
ALIGNED = 4
"""The rows of the tables start at multiples of this number of int32, which is 16 bytes. The matmul kernel is compiled
for this alignment.
"""


@dataclass(frozen=True, eq=False)
class RoutingArrays:
    """The sorted positions of the (row, slot) pairs of n rows and k slots, for E experts.

    All tensors are int32 except `gates`. They are contiguous along a row. The number of a pair is row * k + slot.
    Sorted pairs are ordered by expert, then by row. Pairs without an expert come last, and have -1 in `by_expert` and
    `by_row`. The argument `renumber` of `build_routing` decides how the slots of a row are numbered. The numbering
    changes only `by_expert` and `by_row`. A runner then adds the terms of a row in another order.
    """

    histogram: torch.Tensor
    """[E]: the number of pairs of each expert."""
    starts: torch.Tensor
    """[E + 1]: the first sorted pair of each expert, then the total."""
    block_starts: torch.Tensor
    """[4, E + 1]: the first block of each expert, then the total, for each of `BLOCK_SIZES`."""
    schedule: torch.Tensor
    """[4, n * k]: (number of the block within its expert << 16) + expert for each block. All elements after the last
    block are -1.
    """
    by_expert: torch.Tensor
    """[n * k]: the pair at each sorted position."""
    by_row: torch.Tensor
    """[n * k]: the sorted position of each pair."""
    rows: torch.Tensor
    """[n * k]: the row at each sorted position, or 0 for a pair without an expert."""
    gates: torch.Tensor
    """[n * k]: the weight at each sorted position, or 0 for a pair without an expert."""


def serves(num_rows: int, top_k: int) -> bool:
    """Return whether `build_routing` accepts ids [num_rows, top_k]."""
    return 0 < num_rows * top_k <= MAX_PAIRS


def build_routing(
    ids: torch.Tensor, weights: torch.Tensor, num_experts: int, dtype: torch.dtype, renumber: bool
) -> RoutingArrays:
    """Return the routing arrays for `ids` [n, k] int32 and `weights` [n, k] float32. An empty slot has the id -1.

    A row may contain an expert twice. `dtype` is the dtype of the gates. If `renumber` is True, the slots of a row are
    numbered by ascending expert. Otherwise they keep the order of `ids`. A CUDA graph can capture the launch. Raises
    ValueError if `serves` returns False for the batch.
    """
    num_pairs = ids.numel()
    if not serves(*ids.shape):
        raise ValueError(f"ids must have 1 to {MAX_PAIRS} elements (got {num_pairs})")
    pairs = SMALL if num_pairs <= SMALL else MAX_PAIRS
    table = ids.new_empty((1 + len(BLOCK_SIZES), cdiv(num_experts + 1, ALIGNED) * ALIGNED))
    schedule = ids.new_empty((len(BLOCK_SIZES), pairs))
    arrays = RoutingArrays(
        histogram=ids.new_empty(num_experts),
        starts=table[0, : num_experts + 1],
        block_starts=table[1:, : num_experts + 1],
        schedule=schedule[:, :num_pairs],
        by_expert=ids.new_empty(num_pairs),
        by_row=ids.new_empty(num_pairs),
        rows=ids.new_empty(num_pairs),
        gates=ids.new_empty(num_pairs, dtype=dtype),
    )
    routing_kernel[(2,)](
        ids.contiguous(),
        weights.contiguous(),
        arrays.histogram,
        table,
        schedule,
        arrays.by_expert,
        arrays.by_row,
        arrays.rows,
        arrays.gates,
        num_pairs,
        top_k=ids.shape[1],
        num_experts=num_experts,
        stride=table.stride(0),
        pairs=pairs,
        experts=triton.next_power_of_2(num_experts),
        renumber=renumber,
        num_warps=WARPS,
        **OPTIONS,
    )
    return arrays


@triton.jit(do_not_specialize=["num_pairs"])
def routing_kernel(
    ids: tl.tensor,  # [n, k] int32
    weights: tl.tensor,  # [n, k] fp32
    histogram: tl.tensor,  # here and below: the fields of `RoutingArrays`
    table: tl.tensor,  # [5, stride] int32: `starts`, then `block_starts`
    schedule: tl.tensor,  # [4, pairs] int32
    by_expert: tl.tensor,
    by_row: tl.tensor,
    rows: tl.tensor,
    gates: tl.tensor,
    num_pairs: tl.tensor,
    top_k: tl.constexpr,
    num_experts: tl.constexpr,
    stride: tl.constexpr,
    pairs: tl.constexpr,  # tile sizes: powers of two
    experts: tl.constexpr,
    renumber: tl.constexpr,
) -> None:
    pair = tl.arange(0, pairs)
    present = pair < num_pairs
    chosen = tl.load(ids + pair, mask=present, other=-1)
    chosen = tl.where(chosen < 0, num_experts, chosen)  # empty slots sort after all experts
    if tl.program_id(0) == 0:  # sort the pairs
        weight = tl.load(weights + pair, mask=present, other=0.0)
        row = pair // top_k
        key = chosen * pairs + pair  # no two keys are equal
        ahead = key[:, None] < key[None, :]
        if renumber:
            same_row = row[:, None] == row[None, :]
            # One sum computes two counts. The low bits count all pairs ahead, and the high bits count the pairs ahead
            # in the same row.
            counts = tl.sum(tl.where(ahead, tl.where(same_row, 1 + (1 << 16), 1), 0), 0)
            place = counts & 0xFFFF
            number = row * top_k + (counts >> 16)
        else:
            place = tl.sum(ahead.to(tl.int32), 0)
            number = pair
        held = chosen < num_experts
        tl.store(by_expert + place, tl.where(held, number, -1), mask=present)
        tl.store(by_row + number, tl.where(held, place, -1), mask=present)
        tl.store(rows + place, tl.where(held, row, 0), mask=present)
        tl.store(gates + place, tl.where(held, weight, 0.0).to(gates.dtype.element_ty), mask=present)
    else:  # build the tables
        expert = tl.arange(0, experts)
        exists = expert < num_experts
        count = tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
        count = tl.where(exists, count, 0)
        tl.store(histogram + expert, count, mask=exists)
        # One scan computes all five rows of the table. Each row takes 12 bits.
        packed = count.to(tl.int64)
        for size in tl.static_range(1, 5):
            packed |= ((count + (8 << size) - 1) >> (3 + size)).to(tl.int64) << (12 * size)
        before = tl.cumsum(packed, 0) - packed
        whole = tl.sum(packed, 0)
        for size in tl.static_range(0, 5):
            own = ((packed >> (12 * size)) & 0xFFF).to(tl.int32)
            start = ((before >> (12 * size)) & 0xFFF).to(tl.int32)
            total = ((whole >> (12 * size)) & 0xFFF).to(tl.int32)
            tl.store(table + size * stride + expert, start, mask=exists)
            tl.store(table + size * stride + num_experts, total)
            if size > 0:
                entry = schedule + (size - 1) * pairs
                for index in tl.static_range((pairs + (8 << size) - 1) // (8 << size)):
                    tl.store(entry + start + index, (index << 16) + expert, mask=index < own)
                tl.store(entry + pair, -1, mask=pair >= total)
