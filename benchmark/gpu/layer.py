"""Experiment `layer`: the MoE layer of 16 tokens against the number of active experts, and what a policy takes off it.

OEA's Figure 1 and Table 3, at the shapes of Qwen3-30B-A3B, gpt-oss-120b and gpt-oss-20b, in bf16.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmark.common.comparison import fit_line
from benchmark.common.record import Record
from benchmark.gpu.checks import choose_parts, measure_points
from benchmark.gpu.table import Row, at_least

ROWS = 16
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"hidden": 2048, "width": 768, "experts": 128, "top_k": 8, "layers": 8},
    "gpt-oss-120b": {"hidden": 2880, "width": 2880, "experts": 128, "top_k": 4, "layers": 3, "gpt_oss": True},
    "gpt-oss-20b": {"hidden": 2880, "width": 2880, "experts": 32, "top_k": 4, "layers": 6, "gpt_oss": True},
}
ACTIVE = (4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
POLICIES = ("off", "oea:k0=3", "oea:k0=5", "xshare", "xshare:k0=1,add=24", "xshare:k0=1,add=8")
# OEA, Table 3: the layer takes 0.61 and 0.77 of its time.
GAIN_BARS = {("qwen3-30b-a3b", "oea:k0=3"): 39.0, ("qwen3-30b-a3b", "oea:k0=5"): 23.0}
# Our own aim for Qwen3-30B-A3B: the share of the copy bandwidth that the layer reaches at 24 active experts.
BANDWIDTH_BAR, BANDWIDTH_AT = 75.0, 24


def measure(record: Record, parts: Sequence[str]) -> None:
    """Time every point that the record lacks. One that fails is recorded, stops no other, and is raised at the end."""
    names = choose_parts("layer", parts, SHAPES)
    from benchmark.gpu.timing import measure_copy_bandwidth

    if "copy" not in record:
        record.add("copy", gb_per_s=measure_copy_bandwidth())
    failed = [_measure_shape(record, name) for name in names]
    for reason in filter(None, failed):
        raise RuntimeError(reason)


def rows(points: Mapping[str, Any]) -> list[Row]:
    """The fit, the bandwidth and the gains of every shape."""
    found = []
    copy = points["copy"]["gb_per_s"] if "copy" in points else None
    if copy is not None:
        found.append(Row("device-to-device copy", f"{copy:.0f} GB/s"))
    for name in SHAPES:
        mine = {key.removeprefix(f"{name}/"): point for key, point in points.items() if key.startswith(f"{name}/")}
        found += _fit_rows(name, mine, copy) + _gain_rows(name, mine)
    return found


def active_key(active: int) -> str:
    """A point's key, after its shape's name."""
    return f"active={active}"


def _measure_shape(record: Record, name: str) -> str | None:
    """Returns why the first point failed, if one did."""
    from benchmark.common.variant import parse_plan
    from benchmark.gpu import moe_layer
    from benchmark.gpu.timing import time_graph
    from sglang_xshare import Router, build_plan

    shape = moe_layer.Shape(name, **SHAPES[name])
    layers = moe_layer.MoeLayers(shape, ROWS)
    logits = moe_layer.draw_logits(shape, ROWS, "cuda")

    def time_active(active: int) -> dict[str, Any]:
        ids = moe_layer.route_to(active, shape, ROWS, "cuda")
        us = time_graph(partial(layers.run, moe_layer.fixed_router(ids))) / shape.layers
        print(f"{name}/{active_key(active)}: {us:.1f} us", flush=True)
        return {"active": active, "us": us, "expert_bytes": shape.expert_bytes}

    def time_policy(policy: str) -> dict[str, Any]:
        config = moe_layer.make_topk_config(shape, plans[policy], ROWS, "cuda")
        route = moe_layer.model_router(logits, config)
        us = time_graph(partial(layers.run, route)) / shape.layers
        # What a router takes between a layer's other kernels: its choice is computed, the fixed one's experts run.
        both = partial(layers.run, lambda layer, hidden: (route(layer, hidden), fixed(layer, hidden))[1])
        router_us = (time_graph(both) - time_graph(partial(layers.run, fixed))) / shape.layers
        active = moe_layer.count_active(shape, logits, plans[policy] or build_plan("vanilla"))
        print(f"{name}/{policy}: {us:.1f} us, router {router_us:.2f}, {active:.1f} active experts", flush=True)
        return {"active": active, "us": us, "router_us": router_us}

    fixed = moe_layer.fixed_router(moe_layer.route_to(BANDWIDTH_AT, shape, ROWS, "cuda"))
    plans = {policy: None if policy == "off" else parse_plan(policy, ROWS) for policy in POLICIES}
    # Of a model with fewer experts a token, a warm-up of so many is none.
    router = Router(top_k=shape.top_k)
    plans = {policy: plan for policy, plan in plans.items() if plan is None or plan.warm_up(router) <= shape.top_k}
    possible = [n for n in ACTIVE if shape.top_k <= n <= min(shape.experts, ROWS * shape.top_k)]
    calls = {f"{name}/{active_key(active)}": partial(time_active, active) for active in possible}
    calls |= {f"{name}/{policy}": partial(time_policy, policy) for policy in plans}
    return measure_points(record, calls)


def _fit_rows(name: str, points: Mapping[str, Any], copy: float | None) -> list[Row]:
    timed = [point for key, point in points.items() if key.startswith("active=")]
    fit = fit_line([one["active"] for one in timed], [one["us"] for one in timed])
    if fit is None:
        return []
    slope = timed[0]["expert_bytes"] / fit.slope / 1000
    text = f"{fit.intercept:.1f} us + {fit.slope:.2f} us an active expert, R² {fit.r_squared:.4f}"
    found = [Row(f"{name}, {ROWS} tokens", text), Row(f"{name}, bandwidth of the slope", f"{slope:.0f} GB/s")]
    at = points.get(active_key(BANDWIDTH_AT))
    if at is not None and copy is not None:
        share = 100 * at["active"] * at["expert_bytes"] / at["us"] / 1000 / copy
        bar = BANDWIDTH_BAR if name == "qwen3-30b-a3b" else None
        found.append(at_least(f"{name}, bandwidth at {BANDWIDTH_AT} experts", share, bar, "% of the copy"))
    return found


def _gain_rows(name: str, points: Mapping[str, Any]) -> list[Row]:
    off = points.get("off")
    if off is None:
        return []
    found = [Row(f"{name}, off", f"{off['us']:.1f} us, {off['active']:.1f} experts")]
    for policy in POLICIES[1:]:
        point = points.get(policy)
        if point is not None:
            what = f"{name}, {policy}, {point['us']:.1f} us, {point['active']:.1f} experts"
            gain = 100 * (1 - point["us"] / off["us"])
            found.append(at_least(what, gain, GAIN_BARS.get((name, policy)), "% off"))
    timed = {policy: points[policy]["router_us"] for policy in POLICIES if "router_us" in points.get(policy, {})}
    if timed:
        text = ", ".join(f"{policy} {us:.2f}" for policy, us in timed.items())
        found.append(Row(f"{name}, what routing takes of a layer", f"{text} us"))
    return found
