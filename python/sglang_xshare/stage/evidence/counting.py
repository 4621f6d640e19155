"""A step counted in one launch: selections leave what they found in tables of all layers, and a kernel adds it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ...selection.triton_kernel.recipe import OPTIONS
from ...types import Tally
from .columns import COLUMNS, mark

if TYPE_CHECKING:
    from ...upstream.paging import Residents

BLOCK = tl.constexpr(128)
FIELDS = tl.constexpr(len(COLUMNS))


@triton.jit(do_not_specialize=["num_rows", "outcome", "num_slots"])
def count_kernel(
    active: tl.tensor,  # these four are all layers' `Tally`, or None where no layer selects
    vanilla_active: tl.tensor,
    kept_mass: tl.tensor,
    rescued: tl.tensor,
    selecting: tl.tensor,  # [layers] bool, or None where all layers select
    loaded: tl.tensor,  # [layers, N] bool, or None where no experts are paged
    fits: tl.tensor,  # [layers] bool beside it: whether those that are active were sure to fit
    num_slots: tl.tensor,
    valid: tl.tensor,  # [n] bool, or None
    exact: tl.tensor,  # [n] bool, or None
    totals: tl.tensor,  # [layers, 10] fp64
    counts: tl.tensor,  # [layers, 10] fp64: what is added to the totals
    outcomes: tl.tensor,  # int64: forwards by outcome
    outcome: tl.tensor,  # the step's
    num_rows: tl.tensor,
    num_experts: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """One layer a program. `totals` and `counts` have the columns of `columns.py`."""
    layer = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    rows = num_rows
    if valid is not None:
        live = tl.full((BLOCK,), 0, tl.int32)
        for start in range(0, num_rows, BLOCK):
            live += tl.load(valid + start + place, mask=start + place < num_rows, other=0).to(tl.int32)
        rows = tl.sum(live, 0)
    counted = rows > 0
    if layer == 0:
        tl.store(outcomes + outcome, tl.load(outcomes + outcome) + counted.to(tl.int64))
    if active is not None:
        if selecting is not None:
            rows = tl.where(tl.load(selecting + layer) != 0, rows, 0)
        counted = rows > 0
        experts = tl.arange(0, width)
        there = experts < tl.where(counted, num_experts, 0)
        experts += layer * num_experts
        vanilla = tl.load(vanilla_active + experts, mask=there, other=0).to(tl.int32)
        own = tl.load(active + experts, mask=there, other=0).to(tl.int32)
        before, after = tl.sum(vanilla, 0), tl.sum(own, 0)
        kept = tl.full((BLOCK,), 0, tl.float64)
        for start in range(0, num_rows, BLOCK):
            present = start + place < tl.where(counted, num_rows, 0)
            kept += tl.load(kept_mass + layer * num_rows + start + place, mask=present, other=0).to(tl.float64)
        saved = tl.where(counted, tl.load(rescued + layer), 0)
        marked = tl.full((BLOCK,), 0, tl.int32)
        if exact is not None:
            for start in range(0, num_rows, BLOCK):
                present = start + place < tl.where(counted, num_rows, 0)
                if valid is not None:
                    present &= tl.load(valid + start + place, mask=present, other=0) != 0
                marked += tl.load(exact + start + place, mask=present, other=0).to(tl.int32)
        column = tl.arange(0, 16)
        row = tl.where(column == 0, counted.to(tl.float64), 0.0)
        row = tl.where(column == 1, before.to(tl.float64), row)
        row = tl.where(column == 2, after.to(tl.float64), row)
        row = tl.where(column == 3, tl.sum(kept, 0), row)
        row = tl.where(column == 4, rows.to(tl.float64), row)
        row = tl.where(column == 5, saved.to(tl.float64), row)
        row = tl.where(column == 6, tl.sum(marked, 0).to(tl.float64), row)
        if loaded is not None:
            missing = 1 - tl.load(loaded + experts, mask=there, other=1).to(tl.int32)
            row = tl.where(column == 7, tl.sum(vanilla * missing, 0).to(tl.float64), row)
            row = tl.where(column == 8, tl.sum(own * missing, 0).to(tl.float64), row)
            exceeded = (tl.load(fits + layer) != 0) & (after > num_slots)
            row = tl.where(column == 9, exceeded.to(tl.float64), row)
        there = column < FIELDS
        column += layer * FIELDS
        tl.store(counts + column, row, mask=there)
        tl.store(totals + column, tl.load(totals + column, mask=there, other=0) + row, mask=there)


def count_step(
    outcomes: torch.Tensor,
    outcome: int,
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
    """Where one of `rows` rows is live, add 1 to `outcomes` [m] int64 at `outcome`, and what the tables hold of
    selecting layers to their rows of `totals` [layers, 10] float64; `valid` and `exact` are [rows] bool; `residents`
    and `fits` as in `count_selections`. Returns what was added to the totals, if there are tables.
    """
    counts = torch.empty_like(totals)
    found = (None,) * 4 if tables is None else (tables.active, tables.vanilla_active, tables.kept_mass, tables.rescued)
    num_experts = 1 if tables is None else tables.active.shape[1]
    count_kernel[(1 if tables is None else len(totals),)](
        *found,
        None if all(selecting) else mark(selecting, totals.device),
        None if residents is None else residents.loaded,
        None if residents is None else mark(fits, totals.device),
        0 if residents is None else residents.slots,
        None if valid is None else valid.contiguous(),
        None if exact is None else exact.contiguous(),
        totals,
        counts,
        outcomes,
        outcome,
        rows,
        num_experts=num_experts,
        width=triton.next_power_of_2(num_experts),
        num_warps=1,
        **OPTIONS,
    )
    return counts
