"""The experiment `levers`, which measures the fixed part of an MoE layer's time and the gain of a prebuilt alignment.

The part `fixed` measures a layer of Qwen3-30B-A3B with 16 tokens and fixed expert ids. The layer runs unchanged, and
then with a prebuilt alignment. The part `policies` measures a router and the layer under policies, without and with the
prebuilt alignment. All variants of a part are CUDA graphs in one process. They are replayed in turns, so a drift of the
GPU's clock affects all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

from benchmark.common.comparison import fit_line
from benchmark.common.interval import find_margin
from benchmark.common.record import Record
from benchmark.gpu.checks import measure_points
from benchmark.gpu.layer import (
    BANDWIDTH_AT,
    BANDWIDTH_BAR,
    PREBUILT,
    UPSTREAM,
    active_key,
    bandwidth_row,
    policy_rows,
    time_fixed,
    time_policies,
)
from benchmark.gpu.table import Row, at_most
from benchmark.gpu.timing import measure_copy

PARTS = ("fixed", "policies")
MODEL = "qwen3-30b-a3b"
ACTIVE = (24, 34, 50, 16, 64)
"""The numbers of active experts.

OEA with k0=3 leaves 24 experts active, OEA with k0=5 leaves 34, and without a policy 50 are active. 16 and 64 are added
for the linear fit.
"""
MODES = (UPSTREAM, PREBUILT)
REMOVED = ("without activation", "without sum")
"""Modes in the record of 2026-11-27 that skipped a part of the layer. They are not used for the fit."""
POLICIES = ("oea:k0=3", "oea:k0=5", "xshare", "xshare:k0=1,add=24")
FIXED_BAR = 23.0
"""The target for the part of a layer's time that does not depend on the active experts, in microseconds."""
GAIN_BARS = {"oea:k0=3": 40.0, "oea:k0=5": 23.0}
"""The target gains in percent, with the prebuilt alignment. A gain includes the layer and its router."""


def list_points(parts: Sequence[str]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return a dict from the key of each point to the function that measures it. The most useful points come first."""
    fixed = [(active_key(n), partial(time_fixed, MODEL, n, MODES)) for n in ACTIVE if "fixed" in parts]
    policies = [("policies", partial(time_policies, MODEL, POLICIES))] if "policies" in parts else []
    return dict([*fixed[:3], *policies, *fixed[3:]])


def measure(record: Record, parts: Sequence[str]) -> str | None:
    """Measure all points that are missing in the record. Return the first failure, or None."""
    measure_copy(record)
    return measure_points(record, list_points(parts))


def rows(points: Mapping[str, Any]) -> Iterator[Row]:
    """Yield rows with the gain of each mode, the fixed part, the bandwidth and the gains of policies.

    The rows contain all modes of the record. Only the last mode is compared with the targets.
    """
    timed = [points[active_key(active)] for active in sorted(ACTIVE) if active_key(active) in points]
    for point in timed:
        us, what = point["mode_us"], f"layer, {point['active']} experts"
        yield Row(f"{what}, {UPSTREAM}", f"{mean(us[UPSTREAM]):.2f} us")
        for mode in [one for one in us if one != UPSTREAM]:
            yield Row(f"{what}, {mode}", f"{spell_change(us[UPSTREAM], us[mode])} us")
    shown = list(dict.fromkeys(mode for point in timed for mode in point["mode_us"] if mode not in REMOVED))
    for mode in shown:
        us = {point["active"]: mean(point["mode_us"][mode]) for point in timed if mode in point["mode_us"]}
        fit = fit_line([*us], [*us.values()])
        if fit is not None:
            what = f"fixed part, {mode}, beside {fit.slope:.2f} us an active expert"
            yield at_most(what, fit.intercept, FIXED_BAR if mode == shown[-1] else None, "us")
    if "copy" in points and active_key(BANDWIDTH_AT) in points:
        point, copy = points[active_key(BANDWIDTH_AT)], points["copy"]["gb_per_s"]
        for mode in [one for one in point["mode_us"] if one not in REMOVED]:
            bar = BANDWIDTH_BAR if mode == shown[-1] else None
            yield bandwidth_row("", f", {mode}", point["expert_bytes"], mean(point["mode_us"][mode]), copy, bar)
    if "policies" in points:
        us, active = points["policies"]["mode_us"], points["policies"]["active"]
        bars = {name: GAIN_BARS[policy] for name in us for policy in GAIN_BARS if name.startswith(f"{policy} ")}
        yield from policy_rows("layer and router", us, active, bars)


def spell_change(before: Sequence[float], after: Sequence[float]) -> str:
    """Format the mean difference of paired times and half of its 95 % t-interval."""
    changes = [new - old for old, new in zip(before, after, strict=True)]
    return f"{mean(changes):+.2f} ± {find_margin(changes) or 0.0:.2f}"
