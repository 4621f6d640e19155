"""Tiles, which divide the rows of a batch among the programs of a kernel, and pad sizes to powers of two."""

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from triton import next_power_of_2

from ...policies.plan import SelectionPlan
from ...types import Batch, Router

SHAPES_FILE = Path(__file__).with_name("shapes.json")
MAX_PROGRAMS = 128


@dataclass(frozen=True)
class Tile:
    """The sizes of a program's tile. All sizes are powers of two, so one compiled kernel serves many batch sizes."""

    rows: int
    experts: int
    request: int
    columns: int
    several: bool
    """True if the rows are spread over several programs."""
    warps: int


@dataclass(frozen=True)
class Shape:
    """The fastest measured launch shapes for layers with at most `experts` experts."""

    experts: int
    """The largest number of experts for which the shape is used. If several shapes qualify, the one with the smallest
    number is used.
    """
    one: dict[int, int] = field(hash=False)
    """The number of warps for each number of rows in the tile, if a batch runs in one program. For more rows, several
    programs are faster.
    """
    several: tuple[int, int]
    """The rows and the warps of each program if there are several programs."""


def load_shapes(path: Path = SHAPES_FILE) -> list[Shape]:
    """Return the shapes in a file, in ascending order of `experts`.

    The file contains a list `shapes`, whose elements have the fields of `Shape`.
    """
    found = [
        Shape(one["experts"], {int(rows): warps for rows, warps in one["one"].items()}, tuple(one["several"]))
        for one in json.loads(path.read_text())["shapes"]
    ]
    return sorted(found, key=lambda shape: shape.experts)


SHAPES = load_shapes()


def make_tile(
    plan: SelectionPlan,
    router: Router,
    batch: Batch,
    num_rows: int,
    num_experts: int,
    shared: int = 0,
) -> Tile:
    """Return the tile of a batch. A small batch runs in one program, and a larger batch runs in several programs."""
    shape = next((shape for shape in SHAPES if num_experts <= shape.experts), SHAPES[-1])
    columns = plan.columns(router, exact=batch.exact is not None)
    return _cut(shape, count_tokens(plan, batch), columns, num_rows, num_experts, shared)


@lru_cache(maxsize=4096)
def _cut(shape: Shape, tokens: int, columns: int, num_rows: int, num_experts: int, shared: int) -> Tile:
    """Return the tile for a number of rows. The result is cached for all layers and steps of this size."""
    request = next_power_of_2(tokens)
    experts = next_power_of_2(num_experts)
    all_rows = next_power_of_2(num_rows // tokens) * request
    rows = min((rows for rows in shape.one if rows >= all_rows), default=0)
    warps = shape.one.get(rows, shape.several[1])
    rows = rows or max(shape.several[0], request, next_power_of_2(-(-num_rows // MAX_PROGRAMS)))
    several = rows < all_rows
    return Tile(
        rows=rows,
        experts=experts,
        request=request,
        columns=max(32, next_power_of_2(columns + shared)),
        several=several,
        warps=warps,
    )


def count_programs(tile: Tile, plan: SelectionPlan, batch: Batch, num_rows: int) -> int:
    """Return the number of programs. Each program contains only whole requests."""
    return -(-num_rows // (tile.rows // tile.request * count_tokens(plan, batch)))


def count_tokens(plan: SelectionPlan, batch: Batch) -> int:
    """Return the number of consecutive rows that must be in the same program.

    These are the rows of a request if the plan has a budget for each request. Otherwise the number is 1.
    """
    return batch.tokens_per_request if plan.add_per_request else 1
