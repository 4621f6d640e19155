"""Pairs of a row and a slot, sorted by expert. SGLang's fused MoE runner needs sorted pairs for its matrix products."""

import torch

from ..types import Alignment

BLOCK = 16
"""The number of pairs in a block of the selection kernel's alignment. SGLang's BLOCK_SIZE_M has the same value for
batches of up to 16 rows.
"""


def count_blocks(most: int, pairs: int, block_size: int = BLOCK) -> int:
    """Return the largest number of blocks that the pairs can need.

    `pairs` is the number of pairs, and `most` is the largest number of different experts among them.

    An expert with c pairs needs 1 + (c - 1) // block_size blocks. For A experts the sum of these numbers is at most A +
    (pairs - A) // block_size. The reason is that rounding down each term loses at least as much as rounding down the
    sum. This bound grows with A.
    """
    most = min(most, pairs)
    return most + (pairs - most) // block_size


def align_pairs(ids: torch.Tensor, block_size: int = BLOCK) -> Alignment:
    """Sort the slots of `ids` by expert in plain torch. This is the reference for the kernel's `Alignment`.

    `ids` is a tensor [n, columns] int32. The returned buffers have room for one block per pair, as the kernel's buffers
    do. The host waits for the device.
    """
    flat = ids.flatten().long()
    pairs = len(flat)
    experts, counts = flat.unique(return_counts=True)
    blocks = (counts + block_size - 1) // block_size
    begins = (blocks.cumsum(0) - blocks) * block_size
    rank = torch.arange(pairs, device=ids.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    sorted_token_ids = ids.new_full((pairs * block_size,), pairs, dtype=torch.int32)
    sorted_token_ids[begins.repeat_interleave(counts) + rank] = flat.argsort(stable=True).int()
    expert_ids = ids.new_full((pairs,), -1, dtype=torch.int32)
    expert_ids[: int(blocks.sum())] = experts.repeat_interleave(blocks).int()
    return Alignment(sorted_token_ids, expert_ids, (blocks.sum() * block_size).int().reshape(1))
