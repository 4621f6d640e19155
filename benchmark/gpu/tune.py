"""Experiment `tune`: the launch of upstream's fused MoE, tuned at the number of experts that a policy leaves active.

Upstream keys its configurations by tokens. Under a policy the tokens decide how many experts are active, so files in
upstream's own format, tuned at those numbers, are all it needs: `write_configs` makes them of a record.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from time import monotonic
from typing import TYPE_CHECKING, Any

from benchmark.common.record import Record, read_record
from benchmark.common.variant import parse_variant
from benchmark.gpu import moe_configs
from benchmark.gpu.checks import choose_parts
from benchmark.gpu.layer import BANDWIDTH_AT, BANDWIDTH_BAR, ROWS, SHAPES
from benchmark.gpu.server import POLICY
from benchmark.gpu.table import Row, at_least

if TYPE_CHECKING:
    from benchmark.gpu.moe_layer import MoeLayers, Shape
    from sglang_xshare import SelectionPlan

TOKENS = (1, 2, 4, 8, 16, 32, 64)
SEARCH_SECONDS = 420.0  # a run has no more searches after this, so that it ends inside ten minutes
FIXED = "fixed"
"""A part beside the shapes: fixed numbers of experts at Qwen3-30B-A3B's shape, by a short search, with the alignment
prebuilt.
"""
FIXED_SHAPE = "qwen3-30b-a3b"
FIXED_SECONDS = 45.0


@dataclass(frozen=True)
class Point:
    """A batch to tune for: `rows` tokens, and `active` experts where they are not the policy's."""

    rows: int
    active: int | None = None

    @property
    def key(self) -> str:
        """Its key in the record, after the shape's name."""
        return f"tokens={self.rows}" if self.active is None else f"active={self.active}"


FIXED_POINTS = tuple(Point(ROWS, active) for active in (BANDWIDTH_AT, 34, 36))
"""OEA with k0 = 3 leaves 24 experts active, xshare and OEA with k0 = 5 leave 34 and 36."""
POINTS = tuple(Point(rows) for rows in TOKENS)


def measure(record: Record, parts: Sequence[str], policy: str = POLICY) -> None:
    """Tune every point that the record lacks. Raises ValueError for another policy than the record's."""
    parts = choose_parts("tune", parts, (FIXED, *SHAPES))
    names = [name for name in parts if name in SHAPES]
    for rows in TOKENS:
        plan_at(policy, rows)
    recorded = record.points.get("policy", {}).get("policy", policy)
    if recorded != policy:
        raise ValueError(f"policy {policy}: {record.path} is of {recorded}; allowed is that, or another RESULTS folder")
    from benchmark.gpu.timing import measure_copy_bandwidth

    os.environ.pop("SGLANG_MOE_CONFIG_DIR", None)  # what is compared with are upstream's own files
    if "policy" not in record:
        record.add("policy", policy=policy)
    if "copy" not in record:
        record.add("copy", gb_per_s=measure_copy_bandwidth())
    fixed = [one for one in FIXED_POINTS if f"{FIXED_SHAPE}/{one.key}" not in record]
    if FIXED in parts and fixed:
        _tune_shape(record, FIXED_SHAPE, policy, fixed, len(fixed), monotonic() + FIXED_SECONDS)
    missing = {name: [one for one in POINTS if f"{name}/{one.key}" not in record] for name in names}
    left, end = sum(map(len, missing.values())), monotonic() + SEARCH_SECONDS
    for name, points in missing.items():
        if points:
            _tune_shape(record, name, policy, points, left, end)
            left -= len(points)


def rows(points: Mapping[str, Any]) -> list[Row]:
    """Time before and after, and the bandwidth reached, of every shape and number of tokens."""
    copy = points["copy"]["gb_per_s"] if "copy" in points else None
    found = []
    for name in SHAPES:
        for one in (*POINTS, *FIXED_POINTS):
            point = points.get(f"{name}/{one.key}")
            if point is not None and copy is not None:
                found.append(_format_point(name, one, point, copy))
    return found


def write_configs(results: Path) -> None:
    """Write the tuned files of every shape of which a folder's record has all points, and say where."""
    path = results / "tune.json"
    points = read_record(path, "tune")["points"] if path.exists() else {}
    for name in SHAPES:
        tuned = {rows: points.get(f"{name}/{Point(rows).key}") for rows in TOKENS}
        if all(tuned.values()):
            configs = {rows: point["config"] for rows, point in tuned.items() if point is not None}
            files = moe_configs.merge(points[f"{name}/files"]["files"], configs)
            moe_configs.write_files(results / moe_configs.FOLDER, files)
            print(f"{name}: SGLANG_MOE_CONFIG_DIR={results / moe_configs.FOLDER} has {', '.join(files)}")


def plan_at(policy: str, rows: int) -> "SelectionPlan":
    """The plan that a server gives a decode step of `rows` tokens, in its first layer."""
    from sglang_xshare import build_plan
    from sglang_xshare.policies.schedule import build_schedule

    variant = parse_variant(policy)
    schedule = build_schedule(variant.policy, variant.keys, speculative=False) if variant.policy else None
    plan = None if schedule is None or schedule.reason_to_skip("decode", rows) else schedule.plan(0, rows)
    return plan or build_plan("vanilla")


def _tune_shape(record: Record, name: str, policy: str, points: Sequence[Point], left: int, end: float) -> None:
    """Tune these points of a shape; `left` points, with those of other shapes, share the time until `end`."""
    from benchmark.gpu import launch, moe_layer
    from benchmark.gpu.timing import time_graph

    shape = moe_layer.Shape(name, **SHAPES[name])
    layers = moe_layer.MoeLayers(shape, max(TOKENS))
    if f"{name}/files" not in record:
        files = moe_configs.read_upstream(shape.experts, shape.hidden, shape.width, shape.top_k, TOKENS)
        record.add(f"{name}/files", files=files)
    upstream = next(iter(record.points[f"{name}/files"]["files"].values()))
    for number, one in enumerate(points):
        layers.take_rows(one.rows)
        route, active = _route(layers, shape, one, policy)
        run = partial(_run, layers, route)
        time = launch.make_timer(run, shape.layers)
        starts, choices = [launch.complete(upstream[str(one.rows)])], launch.FEW
        if one.active is None:
            starts, choices = [*starts, *_neighbours(record, name, one.rows)], launch.CHOICES
        now = monotonic()
        config, _, finished = launch.descend(starts, time, now + (end - now) / (left - number), choices)
        own, us = time_graph(run) / shape.layers, time(config)
        faster = us < (1 - launch.NOISE) * own
        record.add(
            f"{name}/{one.key}",
            active=active,
            expert_bytes=shape.expert_bytes,
            own_us=own,
            us=us if faster else own,
            config=config if faster else None,
            finished=finished,
        )
        print(f"{name}/{one.key}: {own:.1f} -> {us if faster else own:.1f} us", flush=True)


def _route(layers: "MoeLayers", shape: "Shape", point: Point, policy: str) -> tuple[Callable[..., Any], float]:
    """A router that gives every layer what the point asks for, without work, and the mean number of active experts."""
    from benchmark.gpu import moe_layer

    device = str(layers.source.device)
    if point.active is not None:
        ids = moe_layer.route_to(point.active, shape, point.rows, device)
        return moe_layer.offer_alignment(moe_layer.fixed_router(ids), ids, shape), point.active
    logits = moe_layer.draw_logits(shape, point.rows, device)
    config = moe_layer.make_topk_config(shape, plan_at(policy, point.rows), point.rows, device)
    route = moe_layer.model_router(logits, config)
    routed = [route(i, hidden) for i, hidden in enumerate(layers.source)]
    return lambda layer, hidden: routed[layer], mean(len(one.topk_ids.unique()) for one in routed)


def _run(layers: "MoeLayers", route: Callable[..., Any]) -> Any:
    layers.run(route)
    return layers.hidden


def _neighbours(record: Record, name: str, rows: int) -> list[dict[str, int]]:
    """Return the configuration found for the nearest number of tokens, if any.

    A point of `FIXED_POINTS` has no neighbours: an alignment of ours fits blocks of 16 rows alone.
    """
    tuned = {one.rows: record.points.get(f"{name}/{one.key}", {}).get("config") for one in POINTS}
    tuned = {near: config for near, config in tuned.items() if config is not None}
    return [tuned[min(tuned, key=lambda near: abs(near - rows))]] if tuned else []


def _format_point(name: str, one: Point, point: Mapping[str, Any], copy: float) -> Row:
    speed = point["active"] * point["expert_bytes"] / point["us"] / 1000
    launch = f"{point['own_us']:.1f} -> {point['us']:.1f} us" if point["config"] else f"{point['us']:.1f} us as it was"
    times = f"{launch}, {speed:.0f} GB/s" + ("" if point["finished"] else ", search cut short")
    if one.active is not None:
        bar = BANDWIDTH_BAR if name == "qwen3-30b-a3b" else None
        what = f"{name}, tuned at {one.active} experts, {one.rows} tokens, {times}"
        return at_least(what, 100 * speed / copy, bar, "% of the copy")
    what = f"{name}, {one.rows} tokens, {point['active']:.1f} experts"
    return Row(what, f"{times}, {100 * speed / copy:.1f} % of the copy")
