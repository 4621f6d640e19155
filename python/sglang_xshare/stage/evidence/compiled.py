"""A step counted on a CPU in one call of the compiled library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ...selection.cpu_call import load
from ...types import Tally
from ..step import Step
from .columns import copy_flags

if TYPE_CHECKING:
    from ...upstream.paging import Residents


def add_tables(
    totals: torch.Tensor, tables: Tally, step: Step, residents: Residents | None, fits: Sequence[bool]
) -> torch.Tensor:
    """Add what `counters.count_tables` counts to `totals` [layers, COLUMNS] float64. Returns what was added."""
    counts = torch.empty_like(totals)
    sure = copy_flags(tuple(fits), totals.device) if fits and residents is not None else None
    # Named, as what is made contiguous has to live until the call is over.
    flags = (
        None if residents is None else residents.loaded.contiguous(),
        sure,
        None if step.batch.valid is None else step.batch.valid.contiguous(),
        None if step.batch.exact is None else step.batch.exact.contiguous(),
    )
    load().count_step(
        tables.active.data_ptr(),
        tables.vanilla_active.data_ptr(),
        tables.kept_mass.data_ptr(),
        tables.rescued.data_ptr(),
        *[None if flag is None else flag.data_ptr() for flag in flags],
        totals.data_ptr(),
        counts.data_ptr(),
        0 if residents is None else residents.slots,
        len(totals),
        step.rows,
        tables.active.shape[1],
    )
    return counts
