"""Experiment `levers`: what each part of an MoE layer takes beside its experts, and what the alignment saves.

Part `fixed`: Qwen3-30B-A3B's layer of 16 tokens at fixed ids, as upstream runs it, with the alignment prebuilt, and
without its activation or its final sum, which gives the price of these two. Part `policies`: a router and the layer
under policies, with the alignment handed over and without. All variants of a part are graphs of one process, replayed
in turns: a drift of the clock moves all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import mean
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmark.common.comparison import fit_line
from benchmark.common.record import Record
from benchmark.gpu.checks import choose_parts, measure_points
from benchmark.gpu.layer import ROWS, SHAPES
from benchmark.gpu.table import Row, at_least, at_most, find_error

if TYPE_CHECKING:
    from torch import Tensor

    from benchmark.gpu.moe_layer import MoeLayers, Shape

PARTS = ("fixed", "policies")
MODEL = "qwen3-30b-a3b"
ACTIVE = (24, 34, 50, 16, 64)
"""Numbers of active experts, the most useful first: OEA's k0 = 3 and 5 and no policy leave 24, 34 and 50; two more
serve the fit.
"""
UPSTREAM, PREBUILT = "upstream", "alignment prebuilt"
REMOVED: dict[str, tuple[str, ...]] = {
    "without activation": ("silu_and_mul",),
    "without sum": ("moe_sum_reduce_torch_compile", "moe_sum_reduce"),
}
"""Functions of upstream's runner that do nothing in a variant, whose answer is wrong."""
MODES = (UPSTREAM, PREBUILT, *REMOVED)
"""Modes that are timed. The table also shows modes that older records have."""
RUNNER = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe"
POLICIES = ("oea:k0=3", "oea:k0=5", "xshare", "xshare:k0=1,add=24")
WITH = "with the alignment"
FIXED_BAR = 23.0
"""Microseconds of a layer that do not depend on the number of active experts, with every lever of the record."""
GAIN_BARS = {"oea:k0=3": 40.0, "oea:k0=5": 23.0}
"""Percent off the layer and its router, with every lever of the record."""
BANDWIDTH_BAR, BANDWIDTH_AT = 75.0, 24
"""Percent of the copy bandwidth at this many experts, with every lever of the record."""


def measure(record: Record, parts: Sequence[str]) -> None:
    """Time every point that the record lacks. One that fails is recorded, stops no other, and is raised at the end."""
    parts = choose_parts("levers", parts, PARTS)
    from benchmark.gpu import moe_layer
    from benchmark.gpu.timing import measure_copy_bandwidth

    if "copy" not in record:
        record.add("copy", gb_per_s=measure_copy_bandwidth())
    shape = moe_layer.Shape(MODEL, **SHAPES[MODEL])
    layers = moe_layer.MoeLayers(shape, ROWS)
    fixed = [(fixed_key(active), partial(_time_fixed, shape, layers, active)) for active in ACTIVE if "fixed" in parts]
    policies = [("policies", partial(_time_policies, shape, layers))] if "policies" in parts else []
    if reason := measure_points(record, dict([*fixed[:3], *policies, *fixed[3:]])):
        raise RuntimeError(reason)


def fixed_key(active: int) -> str:
    """Return a point's key in the record."""
    return f"active={active}"


def _time_fixed(shape: "Shape", layers: "MoeLayers", active: int) -> dict[str, Any]:
    """Return microseconds of a layer in every mode and round, in which `active` experts are used."""
    from benchmark.gpu import moe_layer
    from benchmark.gpu.timing import time_alternating
    from sglang_xshare.stage import handover

    ids = moe_layer.route_to(active, shape, ROWS, "cuda")
    route = moe_layer.fixed_router(ids)
    routes = dict.fromkeys(MODES, route) | {PREBUILT: moe_layer.offer_alignment(route, ids, shape)}

    def run(mode: str) -> None:
        with remove(REMOVED.get(mode, ())):
            layers.run(routes[mode])

    runs = {mode: partial(run, mode) for mode in MODES}
    for mode, taken in _count_taken(runs, handover).items():
        _check_taken(mode, taken, shape.layers if mode == PREBUILT else 0)
    us = time_alternating(runs, parts=shape.layers)
    print(f"{fixed_key(active)}: {spell_times(us)}", flush=True)
    return {"active": active, "expert_bytes": shape.expert_bytes, "mode_us": us}


def _time_policies(shape: "Shape", layers: "MoeLayers") -> dict[str, Any]:
    """Return microseconds of a router and a layer by round: off, and each policy without the alignment and with it."""
    from benchmark.common.variant import parse_plan
    from benchmark.gpu import moe_layer
    from benchmark.gpu.timing import time_alternating
    from sglang_xshare.stage import handover

    logits = moe_layer.draw_logits(shape, ROWS, "cuda")
    off = moe_layer.model_router(logits, moe_layer.make_topk_config(shape, None, ROWS, "cuda"))
    runs: dict[str, Callable[[], None]] = {"off": partial(layers.run, off)}
    for policy in POLICIES:
        for prebuilt, name in ((False, policy), (True, f"{policy} {WITH}")):
            # A fresh layer for each: one whose alignment the runner did not take offers none afterwards.
            route = moe_layer.policy_router(shape, parse_plan(policy), logits)
            runs[name] = partial(_run_policy, layers, route, prebuilt)
    taken = _count_taken(runs, handover)
    us = time_alternating(runs, parts=shape.layers)
    print(f"policies: {spell_times(us)}", flush=True)
    active = {policy: moe_layer.count_active(shape, logits, parse_plan(policy)) for policy in POLICIES}
    return {"mode_us": us, "active": active, "taken": taken}


def run_once(shape: "Shape", layers: "MoeLayers", policy: str, prebuilt: bool) -> None:
    """Run the layers once under a policy, which compiles them as `policies` runs them."""
    from benchmark.common.variant import parse_plan
    from benchmark.gpu import moe_layer

    logits = moe_layer.draw_logits(shape, ROWS, "cuda")
    _run_policy(layers, moe_layer.policy_router(shape, parse_plan(policy), logits), prebuilt)


def _run_policy(layers: "MoeLayers", route: Callable[[int, "Tensor"], Any], prebuilt: bool) -> None:
    from sglang_xshare.stage import handover

    handover.configure(prebuilt)
    layers.run(route)


def _count_taken(runs: Mapping[str, Callable[[], None]], handover: Any) -> dict[str, dict[str, int]]:
    """Run each variant twice, which compiles it, and return what the runner took of us in the second run."""
    found = {}
    for name, run in runs.items():
        run()
        before = dict(handover.taken)
        run()
        found[name] = {key: count - before.get(key, 0) for key, count in handover.taken.items()}
    return found


def _check_taken(mode: str, taken: Mapping[str, int], expected: int) -> None:
    """Raise RuntimeError unless the runner took as many alignments as the mode offers."""
    found = taken.get("prebuilt", 0)
    if found != expected:
        raise RuntimeError(f"{mode}: the runner must take {expected} alignments (got {found})")


def spell_times(us: Mapping[str, Sequence[float]]) -> str:
    """Return the mean of each mode's times in one line."""
    return ", ".join(f"{name} {mean(times):.2f}" for name, times in us.items()) + " us"


@contextmanager
def remove(names: Sequence[str]) -> Iterator[None]:
    """Make functions of upstream's runner do nothing."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch(f"{RUNNER}.{name}", return_value=None))
        yield


def rows(points: Mapping[str, Any]) -> list[Row]:
    """Return the price of each part and lever, the fixed part, the bandwidth and the gains under policies.

    The modes are those of the record. The last lever in it, which older records combine with the others, is judged.
    """
    found: list[Row] = []
    copy = points["copy"]["gb_per_s"] if "copy" in points else None
    timed = [points[fixed_key(active)] for active in sorted(ACTIVE) if fixed_key(active) in points]
    for point in timed:
        found += _mode_rows(point)
    shown = list(dict.fromkeys(mode for point in timed for mode in point["mode_us"] if mode not in REMOVED))
    for mode in shown:
        us = {point["active"]: mean(point["mode_us"][mode]) for point in timed if mode in point["mode_us"]}
        fit = fit_line([*us], [*us.values()])
        if fit is not None:
            what = f"fixed part, {mode}, beside {fit.slope:.2f} us an active expert"
            found.append(at_most(what, fit.intercept, FIXED_BAR if mode == shown[-1] else None, "us"))
    for point in timed:
        if copy is not None and point["active"] == BANDWIDTH_AT:
            for mode in [one for one in point["mode_us"] if one not in REMOVED]:
                share = point["active"] * point["expert_bytes"] / mean(point["mode_us"][mode]) / 10 / copy
                bar = BANDWIDTH_BAR if mode == shown[-1] else None
                found.append(at_least(f"bandwidth at {BANDWIDTH_AT} experts, {mode}", share, bar, "% of the copy"))
    return [*found, *(_policy_rows(points["policies"]) if "policies" in points else [])]


def _mode_rows(point: Mapping[str, Any]) -> Iterator[Row]:
    us = point["mode_us"]
    yield Row(f"layer, {point['active']} experts, {UPSTREAM}", f"{mean(us[UPSTREAM]):.2f} us")
    for mode in [one for one in us if one != UPSTREAM]:
        change, error = compare(us[UPSTREAM], us[mode])
        yield Row(f"layer, {point['active']} experts, {mode}", f"{change:+.2f} ± {error:.2f} us")


def _policy_rows(point: Mapping[str, Any]) -> Iterator[Row]:
    us = point["mode_us"]
    yield Row("layer and router, off", f"{mean(us['off']):.2f} us")
    for name in [one for one in us if one != "off"]:
        policy, _, levers = name.partition(" ")
        off = [100 * (1 - on / before) for on, before in zip(us[name], us["off"], strict=True)]
        bar = GAIN_BARS.get(policy) if levers else None
        what = f"layer and router, {name}, {point['active'][policy]:.1f} experts, {mean(us[name]):.2f} us"
        yield at_least(what, mean(off), bar, "% off", find_error(off))


def compare(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Return the mean change of paired times and two standard errors of it."""
    changes = [new - old for old, new in zip(before, after, strict=True)]
    return mean(changes), find_error(changes)
