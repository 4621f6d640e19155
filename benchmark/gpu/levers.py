"""Experiment `levers`: the time of an MoE layer beside its experts, and the time that the prebuilt alignment saves.

Part `fixed`: Qwen3-30B-A3B's layer of 16 tokens at fixed ids, as upstream runs it and with the alignment prebuilt. Part
`policies`: a router and the layer under policies, with the alignment handed over and without. All variants of a part
are graphs of one process, replayed in turns, so a drift of the clock moves all of them.
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
"""Numbers of active experts: 24, 34 and 50 of OEA with k0 = 3, with k0 = 5 and of no policy; two more for the fit."""
MODES = (UPSTREAM, PREBUILT)
REMOVED = ("without activation", "without sum")
"""Modes of the record of 2026-11-27 in which a part of the layer did nothing: they have a price, and no fit."""
POLICIES = ("oea:k0=3", "oea:k0=5", "xshare", "xshare:k0=1,add=24")
FIXED_BAR = 23.0
"""Microseconds of a layer that do not depend on the number of active experts, with every lever of the record."""
GAIN_BARS = {"oea:k0=3": 40.0, "oea:k0=5": 23.0}
"""Percent off the layer and its router, with every lever of the record."""


def list_points(parts: Sequence[str]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return what measures each point, by key, the most useful first."""
    fixed = [(active_key(n), partial(time_fixed, MODEL, n, MODES)) for n in ACTIVE if "fixed" in parts]
    policies = [("policies", partial(time_policies, MODEL, POLICIES))] if "policies" in parts else []
    return dict([*fixed[:3], *policies, *fixed[3:]])


def measure(record: Record, parts: Sequence[str]) -> str | None:
    """Time every point that the record lacks. Return the first failure."""
    measure_copy(record)
    return measure_points(record, list_points(parts))


def rows(points: Mapping[str, Any]) -> Iterator[Row]:
    """Yield what each lever saves, the fixed part, the bandwidth and the gains under policies.

    The modes are those of the record. The last lever in it, which older records combine with the others, is judged.
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
    """Return the mean change of paired times and half of its 95 % t-interval."""
    changes = [new - old for old, new in zip(before, after, strict=True)]
    return f"{mean(changes):+.2f} ± {find_margin(changes) or 0.0:.2f}"
