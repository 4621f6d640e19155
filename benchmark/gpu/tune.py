"""The experiment `tune`, which tunes the launch configurations of SGLang's fused MoE for the experts under a policy.

SGLang chooses a configuration by the number of tokens. Under a policy, the number of tokens also determines the number
of active experts. So the tuned configurations can be stored in SGLang's own file format and need no patch.
`write_configs` creates the files from a record.
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
"""The number of seconds after which a run starts no more searches. So the run ends within ten minutes."""
FIXED, FIXED_SHAPE, FIXED_SECONDS = "fixed", "qwen3-30b-a3b", 45.0
"""The name, the shape and the time of an additional part, which tunes for fixed numbers of active experts.

It uses a short search and a prebuilt alignment.
"""
PARTS = (FIXED, *SHAPES)
POINTS = {f"tokens={rows}": (rows, None) for rows in TOKENS}
FIXED_POINTS = {f"active={active}": (ROWS, active) for active in (BANDWIDTH_AT, 34, 36)}
"""The rows and the active experts of each point. None means the number of experts that the policy leaves active.

OEA with k0=3 leaves 24 experts active, xshare leaves 34, and OEA with k0=5 leaves 36.
"""


def measure(record: Record, parts: Sequence[str], policy: str = POLICY) -> None:
    """Tune all points that are missing in the record. Raises ValueError if the record has another policy."""
    plan_at(policy, ROWS)
    recorded = record.points.get("policy", {}).get("policy", policy)
    if recorded != policy:
        raise ValueError(f"the policy must be {recorded}, that of {record.path}, or RESULTS new (got {policy})")
    os.environ.pop("SGLANG_MOE_CONFIG_DIR", None)  # the results are compared with SGLang's own files
    if "policy" not in record:
        record.add("policy", policy=policy)
    measure_copy(record)
    if FIXED in parts:
        _tune(record, policy, [(FIXED_SHAPE, key) for key in FIXED_POINTS], FIXED_SECONDS)
    _tune(record, policy, [(name, key) for name in SHAPES if name in parts for key in POINTS], SEARCH_SECONDS)


def rows(points: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row for every shape and number of tokens.

    A row shows the times before and after tuning, and the bandwidth.
    """
    for name in SHAPES:
        for key in POINTS | FIXED_POINTS:
            if f"{name}/{key}" in points and "copy" in points:
                yield _format_point(name, key, points[f"{name}/{key}"], points["copy"]["gb_per_s"])


def write_configs(results: Path) -> None:
    """Write the tuned files from the record in a results folder, and print their folder.

    Only shapes with complete points are written.
    """
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
    """Return the plan that a server uses for the first layer in a decode step of `rows` tokens."""
    variant = parse_variant(policy)
    schedule = build_schedule(variant.policy, variant.keys, speculative=False) if variant.policy else None
    plan = None if schedule is None or schedule.reason_to_skip("decode", rows) else schedule.plan(0, rows)
    return plan or build_plan("vanilla")


def _tune(record: Record, policy: str, points: Sequence[tuple[str, str]], seconds: float) -> None:
    """Tune all points that are missing in the record. The points share the given time equally."""
    missing = [(name, key) for name, key in points if f"{name}/{key}" not in record]
    end = monotonic() + seconds
    for number, (name, key) in enumerate(missing):
        turn = (end - monotonic()) / (len(missing) - number)
        record.add(f"{name}/{key}", **_tune_point(record, name, key, policy, monotonic() + turn))


def _tune_point(record: Record, name: str, key: str, policy: str, until: float) -> dict[str, Any]:
    """Search for the fastest launch configuration until the given time.

    Return the configuration, its time, and the time with SGLang's own configuration.
    """
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
    """Return a router for a point, and the mean number of active experts.

    The expert ids of the router are fixed, so it launches no kernel.
    """
    shape, device = layers.shape, str(layers.source.device)
    if active is not None:
        ids = moe_layer.route_to(active, shape, rows, device)
        return moe_layer.offer_alignment(moe_layer.fixed_router(ids), ids, shape), active
    logits = moe_layer.draw_logits(shape, rows, device)
    route = moe_layer.make_router(shape, plan_at(policy, rows), logits)
    routed = [route(i, hidden) for i, hidden in enumerate(layers.source)]
    return lambda layer, hidden: routed[layer], mean(len(one.topk_ids.unique()) for one in routed)


def _neighbours(record: Record, name: str, rows: int) -> list[dict[str, int]]:
    """Return the tuned configuration for the nearest number of tokens.

    The result is a list, which is empty if there is no tuned configuration yet. Points of `FIXED_POINTS` do not use
    neighbours, because a prebuilt alignment works only with blocks of 16 rows.
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
