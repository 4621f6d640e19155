"""The prices of levers: paired times, by figures that can be checked by hand."""

import sys
from types import ModuleType

import pytest

from benchmark.gpu import layer, levers
from benchmark.gpu.layer import PREBUILT, REMOVED, UPSTREAM, WITH, active_key
from benchmark.gpu.levers import ACTIVE, MODES, spell_change

FORMER = (UPSTREAM, PREBUILT, "grid trimmed", "both", *REMOVED)
"""Modes of the record of 2026-11-27, when the grid could be trimmed."""


def fixed(active, modes):
    # One expert is 9,437,184 bytes: upstream takes 29 us + 2 us an expert; an alignment 5, a whole grid 2 of them.
    us = {PREBUILT: 5.0, "grid trimmed": 2.0, "both": 7.0, "without activation": 3.0, "without sum": 4.0}
    times = {name: [29.0 + 2 * active - us.get(name, 0.0) + drift for drift in (0.0, 1.0)] for name in modes}
    return {"active": active, "expert_bytes": 9437184, "mode_us": times}


def policies(suffix):
    times = {policy: [65.0, 71.5] for policy in levers.POLICIES}
    times |= {f"{policy}{suffix}": [60.0, 66.0] for policy in levers.POLICIES}
    return {"mode_us": {"off": [100.0, 110.0], **times}, "active": dict.fromkeys(levers.POLICIES, 24.0)}


@pytest.mark.parametrize(
    ("modes", "suffix", "judged", "us", "verdict", "percent"),
    [
        (MODES, WITH, PREBUILT, 24.5, "miss", 78.1),
        (FORMER, " with levers", "both", 22.5, "pass", 80.3),
    ],
)
def test_each_lever_has_its_price_and_the_goals_their_verdicts(modes, suffix, judged, us, verdict, percent):
    """All modes of a record are shown, also of one that is no longer measured; the last lever is judged."""
    points = {active_key(n): fixed(n, modes) for n in ACTIVE}
    points |= {"copy": {"gb_per_s": 4000.0}, "policies": policies(suffix)}
    rows = {row.what: row for row in levers.rows(points)}
    assert rows["layer, 24 experts, upstream"].measured == "77.50 us"
    assert rows["layer, 24 experts, alignment prebuilt"].measured == "-5.00 ± 0.00 us"
    shown = [f"layer, 24 experts, {mode}" for mode in modes]
    assert [what for what in rows if what.startswith("layer, 24 experts, ")] == shown
    part = rows[f"fixed part, {judged}, beside 2.00 us an active expert"]
    assert (part.measured, part.bar, part.verdict) == (f"{us} us", "at most 23 us", verdict)
    share = rows[f"bandwidth at 24 experts, {judged}"]  # 24 x 9.437184 MB in 70.5 us: 3213 GB/s of 4000
    assert (share.measured, share.verdict) == (f"{percent} % of the copy", "pass")
    assert [what for what, row in rows.items() if row.bar.endswith((" us", "copy"))] == [part.what, share.what]
    gains = [row for what, row in rows.items() if what.startswith("layer and router, oea:k0=3")]
    assert [(row.measured, row.bar, row.verdict) for row in gains] == [
        ("35.0 % off", "", ""),
        ("40.0 % off", "at least 40 % off", "pass"),
    ]


def test_a_drift_of_the_clock_is_no_change():
    assert spell_change([10.0, 20.0, 40.0], [9.0, 19.0, 39.0]) == "-1.00 ± 0.00"
    assert (
        spell_change([10.0] * 4, [8.0, 9.0, 9.0, 10.0]) == "-1.00 ± 1.30"
    )  # variance 2/3 of four: 3.182 standard errors


def test_a_lever_that_the_runner_did_not_take_is_no_figure():
    layer.check_taken(PREBUILT, {"prebuilt": 8, "upstream": 0}, 8)
    layer.check_taken(UPSTREAM, {}, 0)
    with pytest.raises(RuntimeError, match=r"prebuilt: the runner must take 8 alignments \(got 7\)"):
        layer.check_taken(PREBUILT, {"prebuilt": 7, "upstream": 1}, 8)


def test_what_is_removed_is_back_afterwards(monkeypatch):
    runner = ModuleType("runner")
    names = [name for removed in REMOVED.values() for name in removed]
    for name in names:
        setattr(runner, name, lambda: "done")
    monkeypatch.setitem(sys.modules, "runner", runner)
    monkeypatch.setattr(layer, "RUNNER", "runner")
    with layer.remove(names):
        assert [getattr(runner, name)() for name in names] == [None] * len(names)
    assert [getattr(runner, name)() for name in names] == ["done"] * len(names)
