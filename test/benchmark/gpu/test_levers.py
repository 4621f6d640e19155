"""The prices of levers: paired times, by figures that can be checked by hand."""

import pytest

from benchmark.gpu import layer, levers
from benchmark.gpu.layer import PREBUILT, UPSTREAM, WITH, active_key
from benchmark.gpu.levers import ACTIVE, MODES, spell_change


def fixed(active):
    # One expert is 9,437,184 bytes: upstream takes 29 us + 2 us an expert; an alignment 5 of them.
    us = {UPSTREAM: 0.0, PREBUILT: 5.0}
    times = {name: [29.0 + 2 * active - us[name] + drift for drift in (0.0, 1.0)] for name in MODES}
    return {"active": active, "expert_bytes": 9437184, "mode_us": times}


def policies():
    times = {policy: [65.0, 71.5] for policy in levers.POLICIES}
    times |= {f"{policy}{WITH}": [60.0, 66.0] for policy in levers.POLICIES}
    return {"mode_us": {"off": [100.0, 110.0], **times}, "active": dict.fromkeys(levers.POLICIES, 24.0)}


def test_the_alignment_has_its_price_and_the_goals_their_verdicts():
    points = {active_key(n): fixed(n) for n in ACTIVE}
    points |= {"copy": {"gb_per_s": 4000.0}, "policies": policies()}
    rows = {row.what: row for row in levers.rows(points)}
    assert rows["layer, 24 experts, upstream"].measured == "77.50 us"
    assert rows["layer, 24 experts, alignment prebuilt"].measured == "-5.00 ± 0.00 us"
    part = rows[f"fixed part, {PREBUILT}, beside 2.00 us an active expert"]
    assert (part.measured, part.bar, part.verdict) == ("24.5 us", "at most 23 us", "miss")
    share = rows[f"bandwidth at 24 experts, {PREBUILT}"]  # 24 x 9.437184 MB in 72.5 us: 3124 GB/s of 4000
    assert (share.measured, share.verdict) == ("78.1 % of the copy", "pass")
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
