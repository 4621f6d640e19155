"""The table of served policies: one row each, what it gains beside what it costs, on figures checked by hand."""

from dataclasses import asdict
from pathlib import Path

import pytest

from benchmark.common.evidence import Evidence
from benchmark.common.rounds import Series, Workload
from benchmark.common.speculative import drafting_variant
from benchmark.common.variant import parse_variant
from benchmark.serving.report import KEY, quality_key, summarize_serving, tabulate_serving, tabulate_verified

NAMES = ("off", "oea:k0=3", "xshare", "EAGLE-3, off", "EAGLE-3, xshare")


def make_series(name, speed, active, accepted=None):
    variant = parse_variant(name.removeprefix("EAGLE-3, "))
    if accepted:
        variant = drafting_variant(variant, ("--speculative-num-draft-tokens", "8"))
    result = {"output_throughput": speed, "median_tpot_ms": 9.0, "median_ttft_ms": 5.0, "accept_length": accepted}
    evidence = Evidence(None, None, None, 0) if active is None else Evidence(50.0, active, 0.9, 8)
    return Series(variant, [], [result] * 2, [evidence] * 2)


@pytest.fixture
def points():
    series = [
        make_series("off", 100.0, None),
        make_series("oea:k0=3", 120.0, 30.0),
        make_series("xshare", 150.0, 25.0),
        make_series("EAGLE-3, off", 110.0, None, 2.5),
        make_series("EAGLE-3, xshare", 180.0, 28.0, 2.25),
    ]
    nats = ([2.0, 2.0], [2.0, 2.0], [2.0, 2.25], [1.5, 1.5], [1.75, 1.75])
    quality = {quality_key(name): {"nats": one, "sums": 0.75} for name, one in zip(NAMES, nats, strict=True)}
    workload = asdict(Workload(Path("models/wide"), Path("texts"), rounds=2))
    return {KEY: {"workload": workload, "series": [asdict(one) for one in series]}, **quality}


def test_rows_are_the_baseline_policies_and_those_with_drafts_by_ratio(points):
    table = tabulate_serving(points)
    assert [row[0] for row in table.rows] == ["off", "xshare", "oea:k0=3", "EAGLE-3, xshare", "EAGLE-3, off"]
    assert table.rows[0] == ["off", "1.00 [1.00, 1.00]", "100 [100, 100]", "50.0", "1.000", "2.000", "0.750", "-"]
    xshare = ["xshare", "1.50 [1.50, 1.50]", "150 [150, 150]", "50.0 -> 25.0", "0.900", "+0.125 ± 0.125", "0.750", "-"]
    assert table.rows[1] == xshare
    assert table.rows[2][5] == "+0.000 ± 0.000"
    assert table.note.startswith("wide: 32 requests, 16 at a time, 8 tokens in, 32 out, 2 alternating rounds. ")


def test_losses_of_verified_text_are_set_against_each_other_alone(points):
    rows = {row[0]: row for row in tabulate_serving(points).rows}
    assert rows["EAGLE-3, off"][5:] == ["1.500", "0.750", "2.50"]
    assert rows["EAGLE-3, xshare"][5:] == ["+0.250 ± 0.000", "0.750", "2.25"]


def test_a_policy_that_never_selected_and_a_single_round_are_told(points):
    for one in points[KEY]["series"]:
        one["results"], one["evidence"] = one["results"][:1], [asdict(Evidence(None, None, None, 0))]
    note = tabulate_serving(points).note
    assert "shows nothing of the policy: oea:k0=3, xshare, EAGLE-3, xshare." in note
    assert note.endswith("One round shows no spread: its differences prove nothing.")


def test_the_summary_is_three_rows_and_what_drafts_alone_come_to(points):
    table = summarize_serving(points)
    assert [row[0] for row in table.rows] == ["off", "xshare", "EAGLE-3, xshare"]
    assert table.note.endswith("Without a policy EAGLE-3 has the ratio 1.10 [1.10, 1.10].")


def test_what_a_step_verifies_is_told(points):
    table = tabulate_verified(points, points)
    assert table.headings[:2] == ["a step", "policy"]
    assert [row[0] for row in table.rows] == ["16 x 8"] * 10
    assert table.rows[3][1:3] == ["EAGLE-3, xshare", "1.80 [1.80, 1.80]"]
    assert table.note.startswith("wide: a step verifies so many requests x tokens of each, a round 4 times as many")
    series = points[KEY]["series"]
    summary = summarize_serving(points, {KEY: points[KEY] | {"series": series[:1] + series[3:]}})
    assert summary.rows[-1][:2] == ["one request, 8 tokens verified: EAGLE-3, xshare", "1.80 [1.80, 1.80]"]
    assert summary.note.endswith("EAGLE-3 alone has 1.10 [1.10, 1.10] there.")
