"""A table of the time that selection takes."""

from collections.abc import Mapping
from typing import Any

from benchmark.common.comparison import Comparison
from benchmark.common.table import Table
from benchmark.common.variant import BASELINE

UPSTREAM = "upstream's router"
ROUTING, STEP = "routing", "decode step"
"""Keys of the record. `shape_key` returns the other keys."""
SHARE_BAR = 0.01


def shape_key(shape: str) -> str:
    """Return the key of the point for logits of this shape. A shape is spelt ROWSxEXPERTS."""
    return f"select {shape}"


def tabulate_cost(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each policy.

    A row contains the time of select() for each shape. It also shows how much time the policy adds to a layer and to a
    step.
    """
    shapes = [key.removeprefix("select ") for key in points if key.startswith("select ")]
    headings = ["policy", *(f"select() {shape}, us" for shape in shapes), "added a layer, us", "share of a decode step"]
    policies = [name for name in points[shape_key(shapes[0])]["seconds"] if name != UPSTREAM]
    rows = []
    for name in (UPSTREAM, *policies):
        calls = [_call(points[shape_key(shape)]["seconds"], name) for shape in shapes]
        rows.append([name, *calls, *_added(points, name)])
    routing = points[ROUTING]
    step_ms = step_seconds(points) * 1000
    note = (
        "Medians of CPU time on one thread; in brackets relative to upstream's router on the same logits. Added: the "
        f"time that a policy and its stage add to the routing of {routing['rows']} rows in a layer of "
        f"{routing['model']}. Share: of a decode step of {step_ms:.0f} ms in the server; it must stay below "
        f"{SHARE_BAR:.0%}. -: not timed in a step, because the policy selects only in verify steps."
    )
    return Table("What selection costs", headings, rows, note)


def added_share(points: Mapping[str, Any], name: str) -> float:
    """Return the time that a policy adds to a decode step, as a share of the step."""
    return _added_seconds(points[ROUTING], name) / step_seconds(points)


def step_seconds(points: Mapping[str, Any]) -> float:
    """Return the time of a decode step in seconds. It is the server's time per output token in full batches."""
    return Comparison.read(points[STEP]).summaries[0].tpot_ms.median / 1000


def _added_seconds(routing: Mapping[str, Any], name: str) -> float:
    return float(routing["seconds"][name] - routing["seconds"][BASELINE])


def _added(points: Mapping[str, Any], name: str) -> list[str]:
    routing = points[ROUTING]
    if name not in routing["seconds"]:
        return ["-", "-"]
    return [f"{_added_seconds(routing, name) / routing['layers'] * 1e6:.0f}", f"{added_share(points, name):.2%}"]


def _call(seconds: Mapping[str, float], name: str) -> str:
    own, upstream = seconds[name], seconds[UPSTREAM]
    return f"{own * 1e6:.0f}" if name == UPSTREAM else f"{own * 1e6:.0f} ({own / upstream:.1f})"
