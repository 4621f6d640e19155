"""How a batch is cut into tiles: rows a program, and what a tile is padded to."""

from __future__ import annotations

from dataclasses import dataclass

from ...plan import SelectionPlan
from ...types import Batch, Router

# By instruction counts on sm_90 (no timing has confirmed them), one multiprocessor handles so many scores in about the
# time that several take to exchange their words.
SINGLE_PROGRAM = 2048
MAX_PROGRAMS = 64
MIN_ROWS, WARPS = 8, 8
# Slots that one program sorts; with more, upstream's own kernel is left to it.
MAX_SORTED = 1024


@dataclass(frozen=True)
class Tile:
    """What a program holds. All sizes are powers of two, so that a kernel serves many batch sizes."""

    rows: int
    experts: int
    request: int
    columns: int
    several: bool
    """Whether rows are spread over several programs."""
    narrow: bool
    """Whether a utility and an expert's index together fit 31 bits."""
    slots: int = 0
    """Of all programs, where they are sorted."""
    positions: int = 0
    """The alignment's length, at most."""


def make_tile(
    plan: SelectionPlan,
    router: Router,
    batch: Batch,
    num_rows: int,
    num_experts: int,
    block_size: int = 0,
    shared: int = 0,
) -> Tile:
    """One program where the batch is small, or where one row's voice or rescue may change every other; else as many as
    it takes.
    """
    request = round_up(count_tokens(plan, batch))
    experts = round_up(num_experts)
    rows = max(MIN_ROWS, round_up(num_rows // count_tokens(plan, batch)) * request)
    several = rows * experts > SINGLE_PROGRAM and not plan.can_rescue and plan.confidence is None
    if several:
        rows = max(MIN_ROWS, request, round_up(-(-num_rows // MAX_PROGRAMS)))
    columns = plan.columns(router)
    slots = round_up(num_rows * columns) if block_size else 0
    return Tile(
        rows=rows,
        experts=experts,
        request=request,
        columns=max(32, round_up(columns + shared)),
        several=several,
        narrow=not several and rows * experts <= 1 << (31 - 20),
        slots=slots,
        positions=round_up(count_blocks(slots, num_experts, block_size) * block_size) if block_size else 0,
    )


def count_programs(tile: Tile, plan: SelectionPlan, batch: Batch, num_rows: int) -> int:
    """As many as it takes: whole requests lie in each."""
    return -(-num_rows // (tile.rows // tile.request * count_tokens(plan, batch)))


def count_tokens(plan: SelectionPlan, batch: Batch) -> int:
    """Rows that have to lie in one program: a request's, where the plan asks for requests."""
    return batch.tokens_per_request if plan.add_per_request else 1


def count_blocks(slots: int, experts: int, block_size: int) -> int:
    """The most blocks that so many slots of at most so many experts fill."""
    groups = min(slots, experts)
    return groups + (slots - groups) // block_size


def round_up(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()
