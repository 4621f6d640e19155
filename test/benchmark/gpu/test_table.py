"""The table of recorded figures: every bar with its verdict, what is missing left out, nothing made up."""

import pytest
from gpu.recorded import LAYER, served, write_record

from benchmark.common.comparison import Comparison
from benchmark.gpu import eagle3, layer, replay, selection, server
from benchmark.gpu.serving import gain_row, list_percents
from benchmark.gpu.table import Row, at_least, list_rows, show_table


def find(rows: list[Row], start: str) -> Row:
    (row,) = [row for row in rows if row.what.startswith(start)]
    return row


def test_a_bar_within_the_error_is_open():
    found = [at_least("gain", value, 5.4, "%", 2.0) for value in (3.3, 3.5, 7.3, 7.5)]
    assert [row.verdict for row in found] == ["miss", "open", "open", "pass"]
    assert found[0].measured == "3.3 ± 2.0 %"
    unknown = at_least("gain", 50.0, 5.4, "%", None)
    assert (unknown.measured, unknown.verdict) == ("50.0 ± unknown %", "open")
    assert at_least("gain", 50.0, None, "%", None).verdict == ""


def test_the_error_is_the_t_interval_of_the_rounds_ratios():
    comparison = Comparison.read(served(100.0, 110.0, swings=(-1.0, 0.0, 4.0)))
    assert list_percents(comparison) == pytest.approx([9.0, 10.0, 14.0])
    # of 9, 10 and 14: variance 7, and 4.303 * sqrt(7 / 3) = 6.57
    assert gain_row(comparison, "it", 9.0).measured == "11.0 ± 6.6 % gain"
    assert gain_row(comparison, "it", 9.0).verdict == "open"
    assert gain_row(comparison, "it", 18.0).verdict == "miss"
    once = Comparison.read(served(100.0, 110.0, swings=(0.0,)))
    assert gain_row(once, "it", 9.0).measured == "10.0 ± unknown % gain"


def test_layer_fits_and_compares():
    rows = list(layer.rows(LAYER))
    assert find(rows, "qwen3-30b-a3b, 16 tokens").measured == "34.0 us + 2.00 us an active expert, R² 1.0000"
    assert find(rows, "qwen3-30b-a3b, bandwidth of").measured == "4719 GB/s"
    share = find(rows, "qwen3-30b-a3b, bandwidth at 24")  # 24 x 9.437184 MB in 82 us: 2762 GB/s of 4000
    assert (share.measured, share.verdict) == ("69.1 % of the copy", "miss")
    # 1 - 79.2 / 132 = 40 %, 1 - 105.6 / 132 = 20 %
    gains = [find(rows, f"qwen3-30b-a3b, oea:k0={k0}") for k0 in (3, 5)]
    assert [(row.measured, row.verdict) for row in gains] == [("40.0 % off", "pass"), ("20.0 % off", "miss")]
    assert find(rows, "gpt-oss-20b, oea:k0=3").verdict == ""  # no bar there
    assert not [row for row in rows if "gpt-oss-120b" in row.what]


def test_server_bars():
    name, idle = "gpt-oss-120b-no-warm-up", served(100.0, 103.5)
    for one in idle["series"][1]["evidence"]:
        one |= {"experts_before": None, "experts_after": None}
    points = {
        server.point_key(name, 16): served(100.0, 137.0),
        server.point_key(name, 8, server.NOTHING_TO_DROP): served(100.0, 99.4),
        server.point_key(name, 4): idle,
        server.point_key("qwen3-30b-a3b", 8): served(100.0, 120.0),
    }
    for point, policy, concurrency in zip(points.values(), [*POLICIES, "xshare"], (16, 8, 4, 8), strict=True):
        point["series"][1]["variant"]["name"] = policy
        point["workload"]["concurrency"] = concurrency
    found = [(row.measured, row.bar, row.verdict) for row in server.rows(points)]
    # A policy that never acted has no row: what two rounds differ by is no gain.
    assert found == [
        ("37.0 % gain", "at least 36.8 % gain", "pass"),
        ("-0.6 % gain", "at least -0.5 % gain", "miss"),
        ("20.0 % gain", "", ""),
    ]
    assert "100 -> 137 tokens/s, 80.0 -> 40.0 experts, kept mass 0.900" in next(server.rows(points)).what
    assert len(server.tabulate(points).rows) == 3


POLICIES = (server.WITHOUT_WARM_UP, server.NOTHING_TO_DROP, server.WITHOUT_WARM_UP)


@pytest.mark.parametrize(("accepted", "verdict"), [(3.0, "pass"), (1.0, "miss"), (None, "miss")])
def test_eagle3_counts_only_with_the_acceptance_it_asked_for(accepted, verdict):
    gain, acceptance = eagle3.rows({eagle3.POLICY: served(100.0, 115.0, accepted)})
    assert (gain.measured, gain.verdict) == ("15.0 % gain", "pass")
    assert acceptance.verdict == verdict


def counted(rows: float, after: float, before: float = 40.0) -> dict[str, float]:
    return {"rows": rows, "experts_before": before, "experts_after": after, "layer_steps": 756.0}


@pytest.mark.parametrize(
    ("padded", "exact", "tighter", "verdicts"),
    [
        (counted(5292, 30.0), counted(5292, 30.5), counted(5292, 15.0), ["pass", "pass", "pass"]),
        (counted(6048, 33.0), counted(5292, 30.0), counted(5292, 33.0), ["miss", "miss", "miss"]),
    ],
)
def test_replay_sees_padding_and_a_bypass(padded, exact, tighter, verdicts):
    rows = replay.rows({"padded": padded, "exact": exact, "tighter": tighter})
    assert [row.verdict for row in rows] == verdicts


def test_selection_bar():
    times = [
        {
            "policy": "xshare",
            "rows": 16,
            "experts": 128,
            "us": 3.9,
            "upstream_us": 2.0,
            "upstream_later_us": 1.5,
        },
        {"policy": "xshare", "rows": 64, "experts": 256, "us": 5.0, "upstream_us": 2.0},
    ]
    measured = {f"xshare/{one['rows']}x{one['experts']}": one for one in times}
    checked = {"cases": {"passed": True, "equal": 300}, selection.TESTS[0]: {"passed": False, "reason": "2 failed"}}
    rows = list(selection.rows(checked | measured))
    assert [row.verdict for row in rows] == ["pass", "pass", "miss", "miss"]
    assert (rows[0].measured, rows[-1].measured) == ("300 cases equal", "2 failed")
    times = "3.90 us, upstream's router 2.00 us: 1.95 x, from 0.5.20 on 1.50 us: 2.60 x"
    assert rows[1].measured == times


def test_a_record_that_cannot_be_read_is_a_miss_among_the_others(tmp_path, capsys):
    write_record(tmp_path, "layer", LAYER)
    (tmp_path / "server.json").write_text("{")
    write_record(tmp_path, "replay", {"padded": {"rows": 1.0}, "exact": {}, "tighter": {}})
    show_table(tmp_path)
    found = dict(list_rows(tmp_path))
    assert (found["server"].what, found["server"].verdict) == ("its record", "miss")
    assert found["replay"].measured == "KeyError: 'rows'"
    assert found["layer"].what != "its record"
    bandwidth = (
        "| layer | qwen3-30b-a3b, bandwidth at 24 experts |  | 69.1 % of the copy | at least 75 % of the copy | miss |"
    )
    assert bandwidth in (tmp_path / "summary.md").read_text()
    assert "69.1 % of the copy" in capsys.readouterr().out
