"""One compiled call that adds a step's counts to the totals of a CPU server."""

from __future__ import annotations

import torch

from ...types import Batch, Tally
from .library import load


def count_step(
    totals: torch.Tensor,
    tally: Tally,
    batch: Batch,
    rows: int,
    loaded: torch.Tensor | None = None,
    slots: int = 0,
    sure: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add a step's counts to `totals` [layers, columns] float64, and return what is added.

    csrc/counting.cpp names the columns. `tally` has tensors [layers, ...], and `batch` the flags of the step's `rows`.
    With paged experts `loaded` [layers, N] bool marks the experts in a layer's `slots`, and `sure` [layers] bool the
    layers whose active experts fit the slots for all logits.
    """
    counts = torch.empty_like(totals)
    # In a variable, because a contiguous copy has to live until the call is over.
    read = [None if flag is None else flag.contiguous() for flag in (loaded, sure, batch.valid, batch.exact)]
    load().count_step(
        tally.active.data_ptr(),
        tally.vanilla_active.data_ptr(),
        tally.kept_mass.data_ptr(),
        tally.rescued.data_ptr(),
        *[None if flag is None else flag.data_ptr() for flag in read],
        totals.data_ptr(),
        counts.data_ptr(),
        slots,
        len(totals),
        rows,
        tally.active.shape[1],
    )
    return counts
