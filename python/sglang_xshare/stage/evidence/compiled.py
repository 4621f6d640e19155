"""A step counted on a CPU in one call of the compiled library, as `counting.count_step` is in one launch on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...selection.cpu_call import load
from ...types import Tally
from .columns import mark

if TYPE_CHECKING:
    from ...upstream.paging import Residents


def count_step(
    outcomes: torch.Tensor,
    outcome: int | None,
    rows: int,
    valid: torch.Tensor | None,
    totals: torch.Tensor,
    *,
    tables: Tally | None = None,
    selecting: tuple[bool, ...] = (),
    residents: Residents | None = None,
    fits: tuple[bool, ...] = (),
    exact: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `counting.count_step` does; without an `outcome` it is not counted again."""
    counts = torch.empty_like(totals)
    found = (None,) * 4 if tables is None else (tables.active, tables.vanilla_active, tables.kept_mass, tables.rescued)
    flags = (
        None if all(selecting) else mark(selecting, totals.device),
        None if residents is None else residents.loaded.contiguous(),
        None if residents is None else mark(fits, totals.device),
        None if valid is None else valid.contiguous(),
        None if exact is None else exact.contiguous(),
    )
    load().count_step(
        *[None if table is None else table.data_ptr() for table in (*found, *flags)],
        totals.data_ptr(),
        counts.data_ptr(),
        outcomes.data_ptr(),
        -1 if outcome is None else outcome,
        0 if residents is None else residents.slots,
        len(totals),
        rows,
        0 if tables is None else tables.active.shape[1],
    )
    return counts
