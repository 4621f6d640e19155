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
    """Add the counts of a step to `totals` [layers, columns] float64, and return the added counts.

    csrc/counting.cpp lists the columns. The tensors of `tally` have the shape [layers, ...]. `batch` contains the flags
    of the step's `rows` rows.

    `loaded`, `slots` and `sure` are for paged experts. `loaded` [layers, N] bool marks the experts that are in the page
    slots of a layer, and `slots` is the number of a layer's page slots. `sure` [layers] bool marks the layers
    whose active experts fit the page slots for any logits.
    """
    counts = torch.empty_like(totals)
    # This variable keeps contiguous copies alive until the call returns.
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
