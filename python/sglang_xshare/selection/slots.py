"""Slots as MoE runners take them: none of them empty."""

from __future__ import annotations

import torch


def fill_slots(ids: torch.Tensor) -> torch.Tensor:
    """Give every empty slot of `ids` [n, k] int32 (-1) an expert that is awake anyway: the row's own first, or for a
    row without any (padding) the first of some live row. Where no row is live, as when a graph is captured, expert 0.

    MoE runners read weights out of bounds at -1 unless they filter experts. Taking the largest first choice as "some
    live row's" needs no search and no synchronization, since an empty row's is -1.
    """
    if not len(ids):
        return ids
    first = ids[:, :1]
    awake = torch.where(first < 0, first.amax(0, keepdim=True).clamp_min(0), first)
    return torch.where(ids < 0, awake, ids)
