"""The experiment `layer`, which measures the time of an MoE layer for several numbers of active experts and policies.

The layer has 16 tokens in bf16 and the shape of Qwen3-30B-A3B, gpt-oss-120b or gpt-oss-20b. The results correspond to
Figure 1 and Table 3 of the OEA paper. The experiment `levers` measures the same layer in several modes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

from benchmark.common.comparison import fit_line
from benchmark.common.interval import find_margin
from benchmark.common.record import Record
from benchmark.common.variant import parse_plan
from benchmark.gpu import moe_layer
from benchmark.gpu.checks import measure_points
from benchmark.gpu.moe_layer import ROWS, SHAPES, MoeLayers, Shape
from benchmark.gpu.table import Row, at_least
from benchmark.gpu.timing import measure_copy, time_alternating
from sglang_xshare import Router
from sglang_xshare.stage import handover

PARTS = tuple(SHAPES)
ACTIVE = (4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
POLICIES = ("oea:k0=3", "oea:k0=5", "xshare", "xshare:k0=1,add=24", "xshare:k0=1,add=8")
UPSTREAM, PREBUILT = "upstream", "alignment prebuilt"
WITH, ROUTER, ONLY = " with the alignment", "router of ", "24 experts, no router"
"""Parts of the names of runs: a suffix, a prefix and a whole name."""
GAIN_BARS = {("qwen3-30b-a3b", "oea:k0=3"): 39.0, ("qwen3-30b-a3b", "oea:k0=5"): 23.0}
"""The expected gains in percent. In OEA's Table 3, the layer takes 0.61 and 0.77 of its original time."""
BANDWIDTH_BAR, BANDWIDTH_AT = 75.0, 24
"""The target for Qwen3-30B-A3B. With this number of active experts, the layer should reach this percentage of the copy
bandwidth."""


def list_points(parts: Sequence[str]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return a dict from the key of each point to the function that measures it."""
    calls: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in parts:
        shape = SHAPES[name]
        possible = [n for n in ACTIVE if shape.top_k <= n <= min(shape.experts, ROWS * shape.top_k)]
        calls |= {f"{name}/{active_key(n)}": partial(time_fixed, name, n, (UPSTREAM,)) for n in possible}
        # Policies whose warm-up is larger than the model's top-k are skipped, because they change nothing.
        router = Router(shape.top_k)
        policies = [policy for policy in POLICIES if parse_plan(policy, ROWS).warm_up(router) <= shape.top_k]
        calls[f"{name}/policies"] = partial(time_policies, name, policies, alone=True)
    return calls


def measure(record: Record, parts: Sequence[str]) -> str | None:
    """Measure all points that are missing in the record. Return the first failure, or None."""
    measure_copy(record)
    return measure_points(record, list_points(parts))


def active_key(active: int) -> str:
    """Return the last part of the key of a point with fixed expert ids."""
    return f"active={active}"


def time_fixed(name: str, active: int, modes: Sequence[str]) -> dict[str, Any]:
    """Measure the time of a layer in which exactly `active` experts are active.

    The result contains the time in microseconds for each mode and round.
    """
    layers = moe_layer.make_layers(name)
    ids = moe_layer.route_to(active, layers.shape, ROWS, "cuda")
    route = moe_layer.fixed_router(ids)
    prebuilt = moe_layer.offer_alignment(route, ids, layers.shape) if PREBUILT in modes else route
    runs = {mode: partial(layers.run, prebuilt if mode == PREBUILT else route) for mode in modes}
    for mode, taken in count_taken(runs).items():
        check_taken(mode, taken, layers.shape.layers if mode == PREBUILT else 0)
    us = time_alternating(runs, parts=layers.shape.layers)
    print(f"{name}, {active_key(active)}: {spell_times(us)}", flush=True)
    return {"active": active, "expert_bytes": layers.shape.expert_bytes, "mode_us": us}


def time_policies(name: str, policies: Sequence[str], alone: bool = False) -> dict[str, Any]:
    """Measure the time of a router and a layer, without a policy and under each policy.

    Each policy is measured without and with the prebuilt alignment. The result contains the times in microseconds for
    each round. If `alone` is true, the time of each router alone is measured too. For this, the router runs, but the
    layer uses fixed experts.
    """
    layers = moe_layer.make_layers(name)
    shape, logits = layers.shape, moe_layer.draw_logits(layers.shape, ROWS, "cuda")
    plans = {policy: parse_plan(policy, ROWS) for policy in policies}
    off = moe_layer.make_router(shape, None, logits)
    runs: dict[str, Callable[[], object]] = {"off": partial(layers.run, off)}
    for policy, plan in plans.items():
        for prebuilt in (False, True):
            # Each run has a new router. If the runner has not used an offered alignment, the router stops offering it.
            route = moe_layer.make_router(shape, plan, logits)
            runs[policy + WITH * prebuilt] = partial(_run_policy, layers, route, prebuilt)
    if alone:
        fixed = moe_layer.fixed_router(moe_layer.route_to(BANDWIDTH_AT, shape, ROWS, "cuda"))
        runs[f"{ROUTER}off"] = partial(_run_router, layers, off, fixed)
        for policy, plan in plans.items():
            route = moe_layer.make_router(shape, plan, logits)
            runs[ROUTER + policy] = partial(_run_router, layers, route, fixed)
        runs[ONLY] = partial(layers.run, fixed)
    taken = count_taken(runs)
    us = time_alternating(runs, parts=shape.layers)
    print(f"{name}, policies: {spell_times(us)}", flush=True)
    active = {policy: moe_layer.count_active(shape, logits, plan) for policy, plan in plans.items()}
    active["off"] = moe_layer.count_active(shape, logits, parse_plan("vanilla"))
    return {"mode_us": us, "active": active, "taken": taken}


def _run_policy(layers: MoeLayers, route: moe_layer.Route, prebuilt: bool) -> None:
    handover.is_prebuilt = prebuilt
    layers.run(route)


def _run_router(layers: MoeLayers, route: moe_layer.Route, fixed: moe_layer.Route) -> None:
    handover.is_prebuilt = False
    layers.run(lambda layer, hidden: (route(layer, hidden), fixed(layer, hidden))[1])


def count_taken(runs: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, int]]:
    """Return the number of offers that the MoE runner took in each variant.

    Each variant runs twice. The first run compiles the kernels, and the second run is counted.
    """
    found = {}
    for name, run in runs.items():
        run()
        before = dict(handover.taken)
        run()
        found[name] = {key: count - before.get(key, 0) for key, count in handover.taken.items()}
    return found


def check_taken(mode: str, taken: Mapping[str, int], expected: int) -> None:
    """Raise RuntimeError if the runner did not take the expected number of alignments."""
    found = taken.get("prebuilt", 0)
    if found != expected:
        raise RuntimeError(f"{mode}: the runner must take {expected} alignments (got {found})")


def spell_times(us: Mapping[str, Sequence[float]]) -> str:
    """Format the mean time of each mode as one line."""
    return ", ".join(f"{name} {mean(times):.2f}" for name, times in us.items()) + " us"


def rows(points: Mapping[str, Any]) -> Iterator[Row]:
    """Yield rows with the linear fit, the bandwidth and the gains for every shape."""
    copy = points["copy"]["gb_per_s"] if "copy" in points else None
    if copy is not None:
        yield Row("device-to-device copy", f"{copy:.0f} GB/s")
    for name, shape in SHAPES.items():
        mine = {key.removeprefix(f"{name}/"): point for key, point in points.items() if key.startswith(f"{name}/")}
        us = {point["active"]: find_us(point) for key, point in mine.items() if key.startswith("active=")}
        yield from _fit_rows(name, shape, us)
        if copy is not None and BANDWIDTH_AT in us:
            bar = BANDWIDTH_BAR if name == PARTS[0] else None
            yield bandwidth_row(f"{name}, ", "", shape.expert_bytes, us[BANDWIDTH_AT], copy, bar)
        yield from _gain_rows(name, mine)


def find_us(point: Mapping[str, Any]) -> float:
    """Return the time of a point without any of our changes. Records before 2026-11-28 contain only a median."""
    return float(point["us"]) if "us" in point else mean(point["mode_us"][UPSTREAM])


def bandwidth_row(before: str, after: str, expert_bytes: int, us: float, copy: float, bar: float | None) -> Row:
    """Return a row with the layer's bandwidth in percent of the copy bandwidth.

    The layer has `BANDWIDTH_AT` active experts.
    """
    share = 100 * BANDWIDTH_AT * expert_bytes / us / 1000 / copy
    return at_least(f"{before}bandwidth at {BANDWIDTH_AT} experts{after}", share, bar, "% of the copy")


def _fit_rows(name: str, shape: Shape, us: Mapping[int, float]) -> Iterator[Row]:
    fit = fit_line([*us], [*us.values()])
    if fit is not None:
        text = f"{fit.intercept:.1f} us + {fit.slope:.2f} us an active expert, R² {fit.r_squared:.4f}"
        yield Row(f"{name}, {ROWS} tokens", text)
        yield Row(f"{name}, bandwidth of the slope", f"{shape.expert_bytes / fit.slope / 1000:.0f} GB/s")


def _gain_rows(name: str, points: Mapping[str, Any]) -> Iterator[Row]:
    if "policies" in points:
        us, active = dict(points["policies"]["mode_us"]), points["policies"]["active"]
    else:  # records from before 2026-11-28 have one point for each policy
        old = {policy: points[policy] for policy in ("off", *POLICIES) if policy in points}
        us = {policy: [point["us"]] for policy, point in old.items()}
        us |= {ROUTER + policy: [point["router_us"]] for policy, point in old.items() if "router_us" in point}
        active = {policy: point["active"] for policy, point in old.items()}
    only = mean(us.pop(ONLY, [0.0]))
    routers = {one.removeprefix(ROUTER): mean(us.pop(one)) - only for one in list(us) if one.startswith(ROUTER)}
    if "off" in us:
        bars = {one + suffix: bar for (model, one), bar in GAIN_BARS.items() if model == name for suffix in ("", WITH)}
        yield from policy_rows(name, us, active, bars)
    if routers:
        text = ", ".join(f"{policy} {router:.2f}" for policy, router in routers.items())
        yield Row(f"{name}, what routing takes of a layer", f"{text} us")


def policy_rows(
    what: str, us: Mapping[str, Sequence[float]], active: Mapping[str, float], bars: Mapping[str, float]
) -> Iterator[Row]:
    """Yield a row with the time without a policy, and one row with the gain of each policy.

    `us` contains the times of all rounds for each policy. The name of a policy has a suffix if the runner received the
    alignment. `active` contains the number of active experts of each policy.
    """
    experts = f", {active['off']:.1f} experts" if "off" in active else ""
    yield Row(f"{what}, off", f"{mean(us['off']):.2f} us{experts}")
    for name in [one for one in us if one != "off"]:
        off = [100 * (1 - on / before) for on, before in zip(us[name], us["off"], strict=True)]
        row = f"{what}, {name}, {active[name.partition(' ')[0]]:.1f} experts, {mean(us[name]):.2f} us"
        yield at_least(row, mean(off), bars.get(name), "% off", find_margin(off) or 0.0)
