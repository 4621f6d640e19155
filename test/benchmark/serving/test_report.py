"""The tables of served policies, the estimate beside them, and exact requests, on figures checked by hand."""

from dataclasses import asdict, replace

import pytest
from common.made_up import NEVER, make_point, make_series

from benchmark.common.evidence import Evidence
from benchmark.common.plot import draw, find_digest, read_digest
from benchmark.common.speculative import drafting_variant
from benchmark.common.variant import parse_variant
from benchmark.serving import exact
from benchmark.serving.report import (
    KEY,
    OWN_SERVER,
    plot_serving,
    quality_key,
    summarize_serving,
    tabulate_estimate,
    tabulate_serving,
    tabulate_verified,
)
from sglang_xshare.live.client import Client

NAMES = ("off", "oea:k0=3", "xshare", "EAGLE-3, off", "EAGLE-3, xshare")


def make_served(name, speed, active, accepted=None):
    variant = parse_variant(name.removeprefix("EAGLE-3, "))
    if accepted:
        variant = drafting_variant(variant, ("--speculative-num-draft-tokens", "8"))
    return make_series(variant, [speed] * 2, NEVER if active is None else Evidence(50.0, active, 0.9, 8), accepted)


@pytest.fixture
def points():
    figures = (100.0, None), (120.0, 30.0), (150.0, 25.0), (110.0, None, 2.5), (180.0, 28.0, 2.25)
    series = [make_served(name, *found) for name, found in zip(NAMES, figures, strict=True)]
    nats = ([2.0, 2.0], [2.0, 2.0], [2.0, 2.25], [1.5, 1.5], [1.75, 1.75])
    quality = {quality_key(name): {"nats": one, "sums": 0.75} for name, one in zip(NAMES, nats, strict=True)}
    return {KEY: make_point(series, "models/wide", concurrency=1), **quality}


def test_rows_are_the_baseline_policies_and_those_with_drafts_by_ratio(points):
    table = tabulate_serving(points)
    assert [row[0] for row in table.rows] == ["off", "xshare", "oea:k0=3", "EAGLE-3, xshare", "EAGLE-3, off"]
    assert table.rows[0] == ["off", "1.00", "100", "50.0", "1.000", "2.000", "0.750", "-", "-"]
    loss = f"+0.125 ± {12.706 * 0.125:.3f}"  # two batches of one sequence
    xshare = ["xshare", "1.50", "150", "50.0 -> 25.0", "0.900", loss, "0.750", "-", "1.50, 1.50"]
    assert table.rows[1] == xshare
    assert table.rows[2][5] == "+0.000 ± 0.000"
    assert table.note.startswith("wide: 32 requests, 1 at a time, 8 tokens in, 32 out, 2 alternating rounds. ")


def test_losses_of_verified_text_are_set_against_each_other_alone(points):
    rows = {row[0]: row for row in tabulate_serving(points).rows}
    assert rows["EAGLE-3, off"][5:8] == ["1.500", "0.750", "2.50"]
    assert rows["EAGLE-3, xshare"][5:8] == ["+0.250 ± 0.000", "0.750", "2.25"]


def test_a_policy_that_never_selected_and_a_single_round_are_told(points):
    for one in points[KEY]["series"]:
        one["results"], one["evidence"] = one["results"][:1], [asdict(NEVER)]
    note = tabulate_serving(points).note
    assert "shows nothing of the policy: oea:k0=3, xshare, EAGLE-3, xshare." in note
    assert note.endswith("One round has no interval: its differences prove nothing.")


def test_the_summary_is_four_rows_with_a_short_note(points):
    table = summarize_serving(points)
    assert [row[0] for row in table.rows] == ["off", "xshare", "EAGLE-3, off", "EAGLE-3, xshare"]
    assert len(table.note) < 350
    assert "by round" not in " ".join([*table.headings, table.note])
    assert all(len(row) == len(table.headings) for row in table.rows)


def test_what_a_step_verifies_is_told(points):
    table = tabulate_verified(points, points)
    assert table.headings[:2] == ["a step", "policy"]
    assert [row[0] for row in table.rows] == ["1 x 8"] * 10
    assert table.rows[3][1:3] == ["EAGLE-3, xshare", "1.80"]
    assert table.note.startswith("wide: a step verifies so many requests x tokens of each, a round 4 times as many")


def test_a_round_that_fell_behind_shows_in_the_interval(points):
    """Five rounds, one of them at 0.9: quartiles would be [1.5, 1.5]."""
    off, xshare = make_series("off", [100.0] * 5), make_series("xshare", [150.0, 90.0, 150.0, 150.0, 150.0])
    row = tabulate_serving({KEY: make_point([off, xshare])}).rows[1]
    assert row[1] == "1.38 [1.05, 1.71]"
    assert row[-1] == "1.50, 0.90, 1.50, 1.50, 1.50"


def test_vanilla_beside_off_is_explained_and_shown(points):
    points[KEY]["series"].append(make_point([make_series("vanilla", [101.0] * 2)])["series"][0])
    table = summarize_serving(points)
    assert [row[0] for row in table.rows] == ["off", "vanilla", "xshare", "EAGLE-3, off", "EAGLE-3, xshare"]
    assert OWN_SERVER in tabulate_serving(points).note


def test_the_picture_has_a_bar_a_row(points, tmp_path, capsys):
    picture = plot_serving(points)
    speeds, costs = picture.panels
    assert list(speeds.rows) == ["off", "xshare", "oea:k0=3", "EAGLE-3, xshare", "EAGLE-3, off"]
    assert list(speeds.lines[0].x) == [100.0, 150.0, 120.0, 180.0, 110.0]
    assert list(costs.lines[0].x) == [0.0, 0.125, 0.0, 0.25, 0.0]
    for name in ("demo.png", "demo.svg"):
        draw(picture, tmp_path / name)
        assert f"Picture: {tmp_path / name}" in capsys.readouterr().out
        assert read_digest(tmp_path / name) == find_digest(picture)
    points[KEY]["series"][0]["results"][0]["output_throughput"] = 99.0
    assert find_digest(plot_serving(points)) != find_digest(picture)
    assert read_digest(tmp_path / "none.svg") is None


SHAPE = {"batch": 2, "output_tokens": 4, "rounds": 2, "loss_batches": 1}


def point(speeds, active=0.0, exact_rows=0, kept=0.0, nats=(2.0, 3.0, 4.0), marked=(False,) * 3):
    totals = {"layer_steps": 10, "experts_before": 500.0, "experts_after": active, "kept_mass": kept, "rows": 20}
    said = {"totals": totals | {"exact_rows": exact_rows}, "nats": list(nats), "exact": list(marked)}
    return {"shape": SHAPE, "speeds": list(speeds), **said}


def test_what_is_kept_is_paired_within_rounds():
    first = point((10.0, 20.0))
    first["totals"] |= dict.fromkeys(("layer_steps", "experts_before", "rows"), 0)
    points = {
        "vanilla": first,
        "xshare:k0=1,add=8, 0 exact": point((20.0, 40.0), 200.0, 0, 17.0, (2.1, 3.2, 4.3)),
        "xshare:k0=1,add=8, 1 exact": point((15.0, 30.0), 300.0, 5, 18.5, (2.1, 3.0, 4.1), (False, True, False)),
    }
    table = exact.tabulate_exact(points)
    cells = [dict(zip(table.headings, row, strict=True)) for row in table.rows]
    assert [row["exact"] for row in cells] == ["-", "0", "1"]
    assert [row["active"] for row in cells] == ["50.0", "20.0", "30.0"]
    assert cells[1]["gain kept"] == "1.00"
    assert cells[2]["ratio"] == "1.50"
    assert cells[2]["gain kept"] == "0.50"
    assert cells[2]["time kept"] == "0.67"
    assert cells[2]["others' kept mass"] == "0.900"
    assert cells[2]["others' loss, nats"].startswith("+0.1000")
    assert cells[2]["exact rows' loss"] == "0.0000"


def test_marked_requests_say_so_and_keep_their_parameters(monkeypatch):
    asked = []
    monkeypatch.setattr(Client, "ask", lambda own, path, body=None, *args, **more: asked.append(body))
    server = exact.Marking("http://h")
    server.marked = [1]
    server.ask("/generate", {"sampling_params": [{"custom_params": {"tokens": [3]}} for _ in range(2)]})
    assert asked[0]["sampling_params"][0] == {"custom_params": {"tokens": [3]}}
    assert asked[0]["sampling_params"][1] == {"custom_params": {"tokens": [3], "expert_policy": "exact"}}


@pytest.mark.parametrize("counts", [["1"], ["0", "16"], ["0", "-1"]])
def test_a_wrong_count_is_one_line(counts):
    with pytest.raises(SystemExit, match=rf"--exact must be .*\(got {' '.join(counts)}\)"):
        exact.main(["--exact", *counts])


def make_timed(name, tpot_ms, experts_after):
    evidence = NEVER if experts_after is None else Evidence(80.0, experts_after, 0.9, 9)
    return make_series(name, [1000 / ms for ms in tpot_ms], evidence)


def test_a_policy_s_time_is_set_beside_the_bytes_it_reads():
    drafted = make_timed("xshare:k0=2", [100.0, 80.0, 50.0], 40.0)
    series = [
        make_timed("vanilla", [200.0, 100.0, 100.0], None),
        make_timed("oea:k0=3", [200.0, 100.0, 100.0], 80.0),
        make_timed("xshare", [100.0, 80.0, 50.0], 40.0),  # paired: 0.5, 0.8, 0.5
        make_timed("lynx-lat", [300.0, 300.0, 300.0], None),  # it selected in no step
        replace(drafted, variant=replace(drafted.variant, args=("--drafts",))),  # its steps read a draft, too
    ]
    rows = tabulate_estimate({KEY: make_point(series)}).rows
    expert, heads = 3 * 128 * 64 * 32, 128 * (4 + 2 * 2 + 4) * 64
    dense = 4 * (heads + 128 * 64) + 128 * 1024
    share = (dense + 4 * 40 * expert) / (dense + 4 * 80 * expert)
    assert rows == [
        ["xshare", "80.0 -> 40.0", "0.60 [0.17, 1.03]", f"{share:.2f}", f"{share / 0.6 - 1:+.0%}"],
        ["oea:k0=3", "80.0 -> 80.0", "1.00", "1.00", "+0%"],
    ]
    assert share == pytest.approx(0.5, abs=0.03)
