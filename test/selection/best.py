"""The Triton kernel's device function that chooses the best experts, launched by itself."""

import torch
import triton
import triton.language as tl

from sglang_xshare.selection.triton_kernel.experts import keep_until


@triton.jit
def keep_kernel(
    keys: tl.tensor, weights: tl.tensor, kept: tl.tensor, limit: tl.tensor, most: tl.tensor, size: tl.constexpr
) -> None:
    expert = tl.arange(0, size)
    tl.store(kept + expert, keep_until(tl.load(keys + expert), tl.load(weights + expert), limit, most))


def keep(keys, weights, limit, most=None):
    kept = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
    keep_kernel[(1,)](keys, weights, kept, limit, most, size=len(keys))
    return kept
