"""Pairs of a row and a slot, sorted by expert, which upstream's fused MoE runner needs for its matrix products."""

import torch

from ..types import Alignment

BLOCK = 16
"""Pairs in a block of the selection kernel's alignment: upstream's BLOCK_SIZE_M for batches of up to 16 rows."""


def count_blocks(most: int, pairs: int, block_size: int = BLOCK) -> int:
    """Return the most blocks that `pairs` pairs of at most `most` different experts take.

    An expert of c pairs takes 1 + (c - 1) // block_size blocks. The sum over A experts is at most
    A + (pairs - A) // block_size, because rounding each term down loses no less than rounding
    the sum down. This bound grows with A.
    """
    most = min(most, pairs)
    return most + (pairs - most) // block_size


def align_pairs(ids: torch.Tensor, block_size: int = BLOCK) -> Alignment:
    """Sort the slots of `ids` [n, columns] int32 by expert, in plain torch: the reference for the kernel's `Alignment`.

    The buffers have room for one block for each pair, as the kernel's buffers have. The host waits for the device.
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
