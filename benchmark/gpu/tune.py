"""Experiment `tune`: the launch of upstream's fused MoE, tuned at the number of experts that a policy leaves active.

Upstream keys its configurations by tokens. Under a policy the tokens decide how many experts are active, so files in
upstream's own format, tuned at those numbers, need no patch: `write_configs` makes them of a record.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from time import monotonic
from typing import Any

from benchmark.common.record import Record, read_record
from benchmark.common.variant import parse_variant
from benchmark.gpu import launch, moe_configs, moe_layer
from benchmark.gpu.layer import BANDWIDTH_AT, BANDWIDTH_BAR
from benchmark.gpu.moe_layer import ROWS, SHAPES, MoeLayers
from benchmark.gpu.server import POLICY
from benchmark.gpu.table import Row, at_least
from benchmark.gpu.timing import measure_copy, time_graph
from sglang_xshare import SelectionPlan, build_plan
from sglang_xshare.policies.schedule import build_schedule

TOKENS = (1, 2, 4, 8, 16, 32, 64)
SEARCH_SECONDS = 420.0
"""A run starts no more searches after these seconds, and so ends inside ten minutes."""
FIXED, FIXED_SHAPE, FIXED_SECONDS = "fixed", "qwen3-30b-a3b", 45.0
"""A part beside the shapes: fixed numbers of experts at one shape, by a short search, with the alignment prebuilt."""
PARTS = (FIXED, *SHAPES)
POINTS = {f"tokens={rows}": (rows, None) for rows in TOKENS}
FIXED_POINTS = {f"active={active}": (ROWS, active) for active in (BANDWIDTH_AT, 34, 36)}
"""(rows, active experts) by the key after the shape's name; None stands for as many experts as the policy leaves.

OEA with k0 = 3 leaves 24 experts active, xshare and OEA with k0 = 5 leave 34 and 36.
"""


def measure(record: Record, parts: Sequence[str], policy: str = POLICY) -> None:
    """Tune every point that the record lacks. Raises ValueError for another policy than the record's."""
    plan_at(policy, ROWS)
    recorded = record.points.get("policy", {}).get("policy", policy)
    if recorded != policy:
        raise ValueError(f"the policy must be {recorded}, that of {record.path}, or RESULTS new (got {policy})")
    os.environ.pop("SGLANG_MOE_CONFIG_DIR", None)  # the comparison is with upstream's own files
    if "policy" not in record:
        record.add("policy", policy=policy)
    measure_copy(record)
    if FIXED in parts:
        _tune(record, policy, [(FIXED_SHAPE, key) for key in FIXED_POINTS], FIXED_SECONDS)
    _tune(record, policy, [(name, key) for name in SHAPES if name in parts for key in POINTS], SEARCH_SECONDS)


def rows(points: Mapping[str, Any]) -> Iterator[Row]:
    """Yield time before and after, and the bandwidth reached, of every shape and number of tokens."""
    for name in SHAPES:
        for key in POINTS | FIXED_POINTS:
            if f"{name}/{key}" in points and "copy" in points:
                yield _format_point(name, key, points[f"{name}/{key}"], points["copy"]["gb_per_s"])


def write_configs(results: Path) -> None:
    """Write the tuned files of every shape of which a folder's record has all points, and print their folder."""
    path = results / "tune.json"
    points = read_record(path, "tune")["points"] if path.exists() else {}
    for name in SHAPES:
        tuned = {rows: points.get(f"{name}/{key}") for key, (rows, _) in POINTS.items()}
        if all(tuned.values()):
            configs = {rows: point["config"] for rows, point in tuned.items() if point is not None}
            files = moe_configs.merge(points[f"{name}/files"]["files"], configs)
            moe_configs.write_files(results / moe_configs.FOLDER, files)
            print(f"{name}: SGLANG_MOE_CONFIG_DIR={results / moe_configs.FOLDER} has {', '.join(files)}")


def plan_at(policy: str, rows: int) -> SelectionPlan:
    """Return the plan that a server gives a decode step of `rows` tokens, in its first layer."""
    variant = parse_variant(policy)
    schedule = build_schedule(variant.policy, variant.keys, speculative=False) if variant.policy else None
    plan = None if schedule is None or schedule.reason_to_skip("decode", rows) else schedule.plan(0, rows)
    return plan or build_plan("vanilla")


def _tune(record: Record, policy: str, points: Sequence[tuple[str, str]], seconds: float) -> None:
    """Tune the points (shape, key) that the record lacks; they share the time evenly."""
    missing = [(name, key) for name, key in points if f"{name}/{key}" not in record]
    end = monotonic() + seconds
    for number, (name, key) in enumerate(missing):
        turn = (end - monotonic()) / (len(missing) - number)
        record.add(f"{name}/{key}", **_tune_point(record, name, key, policy, monotonic() + turn))


def _tune_point(record: Record, name: str, key: str, policy: str, until: float) -> dict[str, Any]:
    """Return the fastest launch that a search found until then, and times with it and with upstream's."""
    rows, fixed = (POINTS | FIXED_POINTS)[key]
    layers = moe_layer.make_layers(name)
    shape = layers.shape
    if f"{name}/files" not in record:
        files = moe_configs.read_upstream(shape.experts, shape.hidden, shape.width, shape.top_k, TOKENS)
        record.add(f"{name}/files", files=files)
    upstream = next(iter(record.points[f"{name}/files"]["files"].values()))
    layers.take_rows(rows)
    route, active = _route(layers, rows, fixed, policy)
    run = partial(layers.run, route)
    time = launch.make_timer(run, shape.layers)
    starts, choices = [launch.complete(upstream[str(rows)])], launch.FEW
    if fixed is None:
        starts, choices = [*starts, *_neighbours(record, name, rows)], launch.CHOICES
    config, finished = launch.descend(starts, time, until, choices)
    own, us = time_graph(run) / shape.layers, time(config)
    faster = us < (1 - launch.NOISE) * own
    best = us if faster else own
    print(f"{name}/{key}: {own:.1f} -> {best:.1f} us", flush=True)
    found = {"active": active, "expert_bytes": shape.expert_bytes, "own_us": own, "us": best}
    return found | {"config": config if faster else None, "finished": finished}


def _route(layers: MoeLayers, rows: int, active: int | None, policy: str) -> tuple[moe_layer.Route, float]:
    """Return a router that gives every layer the ids of a point, without work, and the mean of active experts."""
    shape, device = layers.shape, str(layers.source.device)
    if active is not None:
        ids = moe_layer.route_to(active, shape, rows, device)
        return moe_layer.offer_alignment(moe_layer.fixed_router(ids), ids, shape), active
    logits = moe_layer.draw_logits(shape, rows, device)
    route = moe_layer.make_router(shape, plan_at(policy, rows), logits)
    routed = [route(i, hidden) for i, hidden in enumerate(layers.source)]
    return lambda layer, hidden: routed[layer], mean(len(one.topk_ids.unique()) for one in routed)


def _neighbours(record: Record, name: str, rows: int) -> list[dict[str, int]]:
    """Return the configuration found for the nearest number of tokens, if any.

    A point of `FIXED_POINTS` has no neighbours: an alignment of ours fits blocks of 16 rows alone.
    """
    tuned = {near: record.points.get(f"{name}/{key}", {}).get("config") for key, (near, _) in POINTS.items()}
    tuned = {near: config for near, config in tuned.items() if config is not None}
    return [tuned[min(tuned, key=lambda near: abs(near - rows))]] if tuned else []


def _format_point(name: str, key: str, point: Mapping[str, Any], copy: float) -> Row:
    rows, active = (POINTS | FIXED_POINTS)[key]
    speed = point["active"] * point["expert_bytes"] / point["us"] / 1000
    times = f"{point['own_us']:.1f} -> {point['us']:.1f} us" if point["config"] else f"{point['us']:.1f} us as it was"
    times += f", {speed:.0f} GB/s" + ("" if point["finished"] else ", search cut short")
    if active is not None:
        bar = BANDWIDTH_BAR if name == FIXED_SHAPE else None
        what = f"{name}, tuned at {active} experts, {rows} tokens, {times}"
        return at_least(what, 100 * speed / copy, bar, "% of the copy")
    what = f"{name}, {rows} tokens, {point['active']:.1f} experts"
    return Row(what, f"{times}, {100 * speed / copy:.1f} % of the copy")
