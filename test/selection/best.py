"""Device functions of the Triton kernel that choose the best experts, each launched by itself."""

import torch
import triton
import triton.language as tl

from sglang_xshare.selection.triton_kernel.experts import keep_until
from sglang_xshare.selection.triton_kernel.rows import EMPTY, begin_rest, find_taken, list_best


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


@triton.jit
def list_kernel(
    keys: tl.tensor, listed: tl.tensor, taken: tl.tensor, rounds: tl.tensor, size: tl.constexpr, unique: tl.constexpr
) -> None:
    place = tl.arange(0, size)[None, :]
    tile = tl.load(keys + place)
    empty = tl.full((1, 2 * size), EMPTY, tl.int32)
    rest = begin_rest(tile, unique)
    rest, best, _ = list_best(tile, rest, tl.arange(0, size), 0, rounds, empty, empty, unique)
    tl.store(listed + tl.arange(0, 2 * size)[None, :], best)
    tl.store(taken + place, find_taken(tile, rest, unique))


def list_row(keys, rounds, unique):
    """Return (the best keys of a row, best first and EMPTY behind them: [2E], which keys they are: [E] bool)."""
    listed = torch.zeros(2 * len(keys), dtype=torch.int32, device=keys.device)
    taken = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
    list_kernel[(1,)](keys, listed, taken, rounds, size=len(keys), unique=unique)
    return listed, taken
