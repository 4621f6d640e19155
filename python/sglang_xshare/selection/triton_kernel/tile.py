"""How a batch is cut into tiles: rows a program, and what a tile is padded to."""

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
    """What a program holds. All sizes are powers of two, so that a kernel serves many batch sizes."""

    rows: int
    experts: int
    request: int
    columns: int
    several: bool
    """Whether rows are spread over several programs."""
    warps: int


@dataclass(frozen=True)
class Shape:
    """What only a GPU can decide of a batch, by its experts."""

    experts: int
    """It holds up to so many, where none of fewer does."""
    one: dict[int, int] = field(hash=False)
    """Rows of tiles in which one program takes a whole batch, and its warps; beyond, several are faster."""
    several: tuple[int, int]
    """Rows a program where there are several, and warps."""


def load_shapes(path: Path = SHAPES_FILE) -> list[Shape]:
    """The shapes of a file, fewest experts first: an object with `shapes`, a list of objects of a `Shape`'s fields."""
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
    """One program where the batch is small, else as many as it takes."""
    shape = next((shape for shape in SHAPES if num_experts <= shape.experts), SHAPES[-1])
    columns = plan.columns(router, exact=batch.exact is not None)
    return _cut(shape, count_tokens(plan, batch), columns, num_rows, num_experts, shared)


@lru_cache(maxsize=4096)
def _cut(shape: Shape, tokens: int, columns: int, num_rows: int, num_experts: int, shared: int) -> Tile:
    """The tile of so many rows, once for all layers and steps of them."""
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
    """As many as it takes: whole requests lie in each."""
    return -(-num_rows // (tile.rows // tile.request * count_tokens(plan, batch)))


def count_tokens(plan: SelectionPlan, batch: Batch) -> int:
    """Rows that have to lie in one program: a request's, where the plan asks for requests."""
    return batch.tokens_per_request if plan.add_per_request else 1
