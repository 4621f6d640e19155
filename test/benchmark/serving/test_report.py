"""The headline table of served policies, its picture, and exact requests, on figures checked by hand."""

import pytest
from common.made_up import NEVER, make_point, make_series

from benchmark.common.evidence import Evidence
from benchmark.common.plot import draw, find_digest, read_digest
from benchmark.common.speculative import drafting_variant
from benchmark.common.variant import parse_variant
from benchmark.serving import exact
from benchmark.serving.report import KEY, plot_serving, quality_key, summarize_serving, tabulate_serving
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
    rows = {row[0]: row for row in tabulate_serving(points).rows}
    assert list(rows) == ["off", "xshare", "oea:k0=3", "EAGLE-3, xshare", "EAGLE-3, off"]
    assert rows["off"] == ["off", "1.00", "100", "50.0", "1.000", "2.000", "0.750", "-", "-"]
    loss = f"+0.125 ± {12.706 * 0.125:.3f}"  # two batches of one sequence
    assert rows["xshare"] == ["xshare", "1.50", "150", "50.0 -> 25.0", "0.900", loss, "0.750", "-", "1.50, 1.50"]
    assert rows["EAGLE-3, off"][5:8] == ["1.500", "0.750", "2.50"]
    assert rows["EAGLE-3, xshare"][5:8] == ["+0.250 ± 0.000", "0.750", "2.25"], "set against drafts alone"
    assert [row[0] for row in summarize_serving(points).rows] == ["off", "xshare", "EAGLE-3, off", "EAGLE-3, xshare"]


def test_a_picture_has_the_rows_and_the_digest_of_its_figures(points, tmp_path):
    picture = plot_serving(points)
    speeds, costs = picture.panels
    assert list(speeds.rows) == ["off", "xshare", "oea:k0=3", "EAGLE-3, xshare", "EAGLE-3, off"]
    assert list(speeds.lines[0].x) == [100.0, 150.0, 120.0, 180.0, 110.0]
    assert list(costs.lines[0].x) == [0.0, 0.125, 0.0, 0.25, 0.0]
    for name in ("demo.png", "demo.svg"):
        draw(picture, tmp_path / name)
        assert read_digest(tmp_path / name) == find_digest(picture)
    points[KEY]["series"][0]["results"][0]["output_throughput"] = 99.0
    assert find_digest(plot_serving(points)) != find_digest(picture)
    assert read_digest(tmp_path / "none.svg") is None


def test_marked_requests_say_so_and_keep_their_parameters(monkeypatch):
    asked = []
    monkeypatch.setattr(Client, "ask", lambda own, path, body=None, *args, **more: asked.append(body))
    server = exact.Marking("http://h")
    server.marked = [1]
    server.ask("/generate", {"sampling_params": [{"custom_params": {"tokens": [3]}} for _ in range(2)]})
    assert asked[0]["sampling_params"][0] == {"custom_params": {"tokens": [3]}}
    assert asked[0]["sampling_params"][1] == {"custom_params": {"tokens": [3], "expert_policy": "exact"}}
