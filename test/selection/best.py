"""Device functions of the Triton kernel that choose the best experts, each launched by itself."""

import torch
import triton
import triton.language as tl

from sglang_xshare.selection.triton_kernel.experts import find_ahead, keep_until


@triton.jit
def keep_kernel(keys: tl.tensor, weights: tl.tensor, kept: tl.tensor, limit: tl.tensor, size: tl.constexpr) -> None:
    expert = tl.arange(0, size)
    tl.store(kept + expert, keep_until(tl.load(keys + expert), tl.load(weights + expert), limit))


@triton.jit
def ahead_kernel(utility: tl.tensor, counts: tl.tensor, size: tl.constexpr) -> None:
    expert = tl.arange(0, size)
    tl.store(counts + expert, tl.sum(find_ahead(tl.load(utility + expert), 0, size), 0))


def keep(keys, weights, limit):
    kept = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
    keep_kernel[(1,)](keys, weights, kept, limit, size=len(keys))
    return kept


def count_ahead(utility):
    counts = torch.zeros_like(utility)
    ahead_kernel[(1,)](utility, counts, size=len(utility))
    return counts
