"""Draft depths: the servers that are compared, the table, the picture, and what is missed; without a server."""

import json
from typing import Any

import pytest
from common.made_up import make_point, make_series

from benchmark.common.variant import Variant
from benchmark.depth import report
from benchmark.depth.__main__ import list_variants
from benchmark.depth.changes import find_arrival, follow, list_late, tabulate_changes
from benchmark.depth.report import THROUGHPUT, UPSTREAM, find_missed, key_of, name_of

SPEEDS = {
    1: {0: 40.0, 1: 50.0, 3: 60.0, UPSTREAM: 55.0, THROUGHPUT: 59.0},
    16: {0: 170.0, 1: 150.0, 3: 120.0, UPSTREAM: 150.0, THROUGHPUT: 163.0},
}


def make_points(speeds=SPEEDS, policy: str = "off") -> dict[str, Any]:
    """A record of two rounds; in the second all are twice as fast."""
    points = {}
    for requests, by_depth in speeds.items():
        series = [
            make_series(Variant(name_of(policy, depth), None, {}), [speed, 2 * speed])
            for depth, speed in by_depth.items()
        ]
        points[key_of(policy, requests)] = make_point(series, concurrency=requests)
    return points


def test_the_table_marks_the_best_fixed_depth_and_what_the_chosen_one_reaches():
    table = report.tabulate_depths(make_points())
    assert table.headings[:5] == ["policy", "requests", "no drafts", "1 draft", "3 drafts"]
    assert table.rows == [
        ["off", "1", "60.0", "75.0", "**90.0**", "82.5", "88.5", "0.98", "1.48", "1.07", "0.98, 0.98"],
        ["off", "16", "**255.0**", "225.0", "180.0", "225.0", "244.5", "0.96", "0.96", "1.09", "0.96, 0.96"],
    ]


def test_what_is_missed_is_named():
    assert find_missed(make_points()) == ["off, 16 at a time: 0.959 of no drafts, must be 0.97"] * 2
    slower = {1: SPEEDS[1] | {UPSTREAM: 60.0}}
    assert find_missed(make_points(slower)) == [f"off, 1 at a time: 0.983 of {UPSTREAM}, must be 1.0"]


def test_the_summary_compares_with_no_drafts_and_the_picture_has_a_panel_a_policy():
    points = make_points() | make_points(policy="xshare")
    table, picture = report.summarize_depths(points), report.plot_depths(points)
    assert table.headings == ["policy", "1 request", "16 requests"]
    assert table.rows == [["off", "1.48", "0.96"], ["xshare", "1.48", "0.96"]]
    assert [panel.title for panel in picture.panels] == ["no policy", "xshare"]
    for panel in picture.panels:
        assert [(line.name, line.is_main) for line in panel.lines][-1] == (THROUGHPUT, True)
        assert {line.x for line in panel.lines} == {(1, 16)}


def test_servers_differ_in_their_drafts_alone(tmp_path):
    variants = list_variants("xshare:k0=1,add=8", tmp_path, [0, 1, 3], tmp_path)
    names = [one.name.rpartition(", ")[2] for one in variants]
    assert names == ["no drafts", "1 draft", "3 drafts", UPSTREAM, THROUGHPUT]
    assert {(one.policy, json.dumps(one.keys)) for one in variants} == {("xshare", '{"k0": 1, "add": 8}')}
    none, first, third, upstream, ours = ([*one.args] for one in variants)
    assert not any("speculative" in flag for flag in none)
    steps = [args[args.index("--speculative-num-steps") + 1] for args in (first, third, upstream, ours)]
    assert steps == ["1", "3", "3", "3"]
    assert upstream[-3:] == ["--speculative-adaptive", "--expert-policy-draft-depth", "upstream"]
    assert ours[-2:] == ["--expert-policy-draft-depth", "throughput"]
    assert json.loads((tmp_path / "candidates.json").read_text()) == {"1": {"candidate_steps": [1, 3]}}


@pytest.mark.parametrize(
    ("looks", "arrived"),
    [
        ([(0, 3), (40, 5), (80, 0), (120, 5), (400, 5), (500, 5)], 40),
        ([(0, 5), (400, 5)], 0),
        ([(10, 3), (20, 3)], 10),  # too short to have settled: the depth that it had most
        ([], None),
    ],
)
def test_a_change_arrives_with_the_depth_that_is_kept(looks, arrived):
    assert find_arrival(looks) == arrived


def test_changes_are_rows_without_the_first_batch():
    points = {
        "0": {"requests": 16, "texts": "heldout", "looks": [[8, 3]]},
        "1": {"requests": 1, "texts": "heldout", "looks": [[5, 3], [50, 5], [400, 5]]},
    }
    assert tabulate_changes(points).rows == [["1 at a time, heldout", "5", "50"]]
    assert list_late(points) == []
    points["2"] = {"requests": 16, "texts": "heldout", "looks": [[5, 3], [301, 5], [400, 5]]}
    assert list_late(points) == ["change 2: 301 verifications, must be at most 300"]


def test_looks_are_at_the_size_of_the_batch_and_count_from_the_change():
    """A size that was never seen begins with 0; looks before its first step show another size."""
    found = [{16: (1000, 3)}, {16: (1000, 3)}, {1: (4, 3), 16: (1000, 3)}, {1: (90, 5), 16: (1000, 3)}]
    assert follow(found, 1) == [(4, 3), (90, 5)]
    assert follow([{16: (1000, 3)}, {16: (1040, 1)}], 12) == [(40, 1)], "a graph of 16 runs 12 requests"
