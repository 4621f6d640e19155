"""The prices of levers: paired times, by figures that can be checked by hand."""

import sys
from types import ModuleType

import pytest

from benchmark.gpu import levers
from benchmark.gpu.levers import ACTIVE, LEVERS, MODES, REMOVED, compare, fixed_key


def fixed(active):
    # One expert is 9,437,184 bytes: upstream takes 29 us + 2 us an expert; an alignment 5, a whole grid 2 of them.
    us = {"alignment prebuilt": 5.0, "grid trimmed": 2.0, "both": 7.0, "without activation": 3.0, "without sum": 4.0}
    times = {name: [29.0 + 2 * active - us.get(name, 0.0) + drift for drift in (0.0, 1.0)] for name in MODES}
    return {"active": active, "expert_bytes": 9437184, "mode_us": times}


POLICIES = {
    "mode_us": {
        "off": [100.0, 110.0],
        **{policy: [65.0, 71.5] for policy in levers.POLICIES},
        **{f"{policy} {levers.WITH}": [60.0, 66.0] for policy in levers.POLICIES},
    },
    "active": dict.fromkeys(levers.POLICIES, 24.0),
}


def test_each_lever_has_its_price_and_the_goals_their_verdicts():
    points = {"copy": {"gb_per_s": 4000.0}, **{fixed_key(n): fixed(n) for n in ACTIVE}, "policies": POLICIES}
    rows = {row.what: row for row in levers.rows(points)}
    assert rows["layer, 24 experts, upstream"].measured == "77.50 us"
    assert rows["layer, 24 experts, alignment prebuilt"].measured == "-5.00 ± 0.00 us"
    part = rows["fixed part, both, beside 2.00 us an active expert"]
    assert (part.measured, part.bar, part.verdict) == ("22.5 us", "at most 23 us", "pass")
    share = rows["bandwidth at 24 experts, both"]  # 24 x 9.437184 MB in 70.5 us: 3213 GB/s of 4000
    assert (share.measured, share.verdict) == ("80.3 % of the copy", "pass")
    gains = [row for what, row in rows.items() if what.startswith("layer and router, oea:k0=3")]
    assert [(row.measured, row.bar, row.verdict) for row in gains] == [
        ("35.0 % off", "", ""),
        ("40.0 % off", "at least 40 % off", "pass"),
    ]


def test_a_drift_of_the_clock_is_no_change():
    assert compare([10.0, 20.0, 40.0], [9.0, 19.0, 39.0]) == (-1.0, 0.0)
    change, error = compare([10.0, 10.0, 10.0, 10.0], [8.0, 9.0, 9.0, 10.0])
    assert (change, error) == (-1.0, pytest.approx(0.816, abs=0.001))  # variance 2/3 of four


def test_a_lever_that_the_runner_did_not_take_is_no_figure():
    levers._check_taken("both", {"prebuilt": 8, "trimmed": 8, "upstream": 0}, 8, True, True)
    with pytest.raises(RuntimeError, match="both: the runner took"):
        levers._check_taken("both", {"prebuilt": 7, "trimmed": 8, "upstream": 1}, 8, True, True)


def test_what_is_removed_is_back_afterwards(monkeypatch):
    runner = ModuleType("runner")
    names = [name for removed in REMOVED.values() for name in removed]
    for name in names:
        setattr(runner, name, lambda: "done")
    monkeypatch.setitem(sys.modules, "runner", runner)
    monkeypatch.setattr(levers, "RUNNER", "runner")
    with levers.remove(names):
        assert [getattr(runner, name)() for name in names] == [None] * len(names)
    assert [getattr(runner, name)() for name in names] == ["done"] * len(names)


def test_levers_differ_in_what_they_hand_over():
    assert len(set(LEVERS.values())) == len(LEVERS)
