"""Experiment `tune`: what it routes, keeps, goes on from and writes. The layer and the timer are stand-ins; routing,
the override and the files are upstream's own.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from gpu.recorded import write_record
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config, get_config

from benchmark.common.record import Record
from benchmark.gpu import launch, moe_layer, timing, tune
from benchmark.gpu.launch import CHOICES
from benchmark.gpu.moe_layer import draw_logits
from benchmark.gpu.tune import POLICY, TOKENS, measure, plan_at, rows, write_configs
from sglang_xshare import Batch, Router, build_plan, select

SMALL = {"hidden": 64, "width": 16, "experts": 32, "top_k": 4, "layers": 2}
BEST = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 128,
    "BLOCK_SIZE_K": 256,
    "GROUP_SIZE_M": 1,
    "num_warps": 8,
    "num_stages": 2,
}


class Layers:
    """Computes something of the input and the routing; the launch decides whether it does, and how fast."""

    def __init__(self, shape, rows):
        self.shape = shape
        self.take_rows(rows)

    def take_rows(self, rows):
        self.source = torch.ones(self.shape.layers, rows, self.shape.hidden).bfloat16()
        self.hidden = torch.empty_like(self.source)

    def run(self, route):
        config = get_config()
        if config is not None and config["num_stages"] == 5:
            raise RuntimeError("out of resource: shared memory")
        self.hidden.copy_(self.source)
        for i, hidden in enumerate(self.hidden):
            hidden += route(i, hidden).topk_ids.float().sum(1, keepdim=True) / 64
            hidden *= 2 if config is not None and config["BLOCK_SIZE_M"] == 64 else 1


@pytest.fixture
def timed(launches_on, monkeypatch):
    """Names of the shapes whose layers were made; the layers of two small models take the time of their launch."""
    made = []

    def time_graph(run, replays=200):
        run()
        config = get_config()
        if config is None:
            return 400.0
        if config["BLOCK_SIZE_M"] == 64:
            return 1.0  # what computes something else would be the fastest
        return 200 * 1.2 ** sum(config[name] != BEST[name] for name in CHOICES)

    def make(shape, rows):
        made.append(shape.name)
        return Layers(shape, rows)

    monkeypatch.setattr(tune, "SHAPES", {"one": SMALL, "two": SMALL | {"width": 32}})
    monkeypatch.setattr(moe_layer, "MoeLayers", make)
    monkeypatch.setattr(launch, "time_graph", time_graph)
    monkeypatch.setattr(timing, "measure_copy_bandwidth", lambda: 4000.0)
    return made


def test_every_point_gets_the_fastest_launch_that_runs_and_is_right(tmp_path, timed, monkeypatch):
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", "elsewhere")  # upstream's own files are what it begins with
    record = write_record(tmp_path, "tune", {})
    measure(record, ["one"])
    points = [record.points[f"one/{one.key}"] for one in tune.POINTS]
    assert [point["config"] for point in points] == [BEST] * 8
    assert {(point["own_us"], point["us"]) for point in points} == {(200.0, 100.0)}  # of two layers
    assert all(point["failed"] > 0 and point["wrong"] > 0 and point["finished"] for point in points)
    assert all(point["tried"] > point["failed"] + point["wrong"] for point in points)
    assert points[1]["tried"] < points[0]["tried"], "the second search should begin where the first ended"


def test_the_policys_own_routing_is_timed(tmp_path, timed):
    record = write_record(tmp_path, "tune", {})
    measure(record, ["one"])
    shape = moe_layer.Shape("one", **SMALL)
    for tokens in TOKENS:
        plan = build_plan("vanilla") if tokens == 1 else build_plan("xshare", k0=1, add=24)
        logits = draw_logits(shape, tokens, "cpu")
        active = [int(select(one, plan, Router(top_k=4), Batch()).active.sum()) for one in logits]
        assert record.points[f"one/tokens={tokens}"]["active"] == sum(active) / 2
    assert record.points["one/active=24"]["active"] == 24


def test_a_policy_applies_as_in_a_server():
    assert plan_at("oea:k0=3", 1) == build_plan("vanilla")  # a batch of one row is vanilla
    assert plan_at("oea:k0=3", 2) == build_plan("oea", k0=3)
    assert plan_at('oea:{"k0": 3, "by_batch": {"8-64": {"k0": 5}}}', 16) == build_plan("oea", k0=5)
    assert plan_at("off", 16) == build_plan("vanilla")


def test_the_next_run_goes_on_from_there(tmp_path, timed, monkeypatch):
    record = write_record(tmp_path, "tune", {})
    add = Record.add

    def add_until_killed(self, key, **measured):
        add(self, key, **measured)
        if key == "one/tokens=4":
            raise KeyboardInterrupt

    monkeypatch.setattr(Record, "add", add_until_killed)
    with pytest.raises(KeyboardInterrupt):
        measure(record, [])
    monkeypatch.setattr(Record, "add", add)
    kept = Record(tmp_path, "tune", []).points
    assert [key for key in kept if "=" in key] == ["one/tokens=1", "one/tokens=2", "one/tokens=4"]
    monkeypatch.setitem(BEST, "num_warps", 4)
    resumed = Record(tmp_path, "tune", [])
    measure(resumed, [])
    found = [resumed.points[f"one/tokens={tokens}"]["config"]["num_warps"] for tokens in TOKENS]
    assert found == [8, 8, 8, 4, 4, 4, 4]
    assert timed == ["one", "one", "two"]
    measure(resumed, [])
    assert timed == ["one", "one", "two"]


def test_what_is_not_faster_stays_upstreams(tmp_path, timed, monkeypatch):
    monkeypatch.setattr(launch, "time_graph", lambda run, replays=200: 400.0 if get_config() is None else 399.0)
    record = write_record(tmp_path, "tune", {})
    measure(record, ["one"])
    point = record.points["one/tokens=16"]
    assert (point["config"], point["us"], point["own_us"]) == (None, 200.0, 200.0)
    write_configs(tmp_path)
    up, down = sorted((tmp_path / "moe-configs").rglob("*.json"))
    assert down.name.endswith("_down.json")
    assert json.loads(up.read_text())["16"] == fused_moe_triton_config.get_default_config(
        16, 32, 16, 64, 4, None, False
    )


def test_a_search_out_of_time_says_so(tmp_path, timed, monkeypatch):
    monkeypatch.setattr(tune, "SEARCH_SECONDS", 0.0)
    record = write_record(tmp_path, "tune", {})
    measure(record, ["one"])
    assert {record.points[f"one/{one.key}"]["finished"] for one in tune.POINTS} == {False}
    assert record.points["one/tokens=64"]["tried"] <= 2


def test_points_share_what_time_is_left(tmp_path, timed, monkeypatch):
    given = []
    clock = SimpleNamespace(now=0.0)

    def descend(starts, time, until):
        given.append(until - clock.now)
        clock.now += 1.0  # less than its share: the others get the rest
        return launch.Found(BEST, 1.0, finished=True)

    monkeypatch.setattr(tune, "monotonic", lambda: clock.now)
    monkeypatch.setattr(tune, "SEARCH_SECONDS", 160.0)
    monkeypatch.setattr(launch, "descend", descend)
    measure(write_record(tmp_path, "tune", {}), [])
    assert given[:2] == [10.0, 159 / 15]
    assert given[-1] == 160 - 15


def test_the_files_are_written_for_complete_shapes_and_read_back(tmp_path, timed, monkeypatch, capsys):
    record = write_record(tmp_path / "complete", "tune", {})
    measure(record, ["two"])
    points = dict(record.points)
    last = points.pop("two/tokens=64")
    record = write_record(tmp_path, "tune", points)
    write_configs(tmp_path)
    folder = tmp_path / "moe-configs"
    assert not folder.exists()
    record.add("two/tokens=64", **{**last, "config": {**BEST, "num_stages": 4}})
    write_configs(tmp_path)
    assert f"two: SGLANG_MOE_CONFIG_DIR={folder} has triton_" in capsys.readouterr().out
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(folder))
    fused_moe_triton_config.get_moe_configs.cache_clear()

    def choose(tokens):
        return fused_moe_triton_config.try_get_optimal_moe_config((32, 64, 64), (32, 64, 32), 4, None, tokens)

    assert [choose(tokens) for tokens in (1, 16, 63, 64)] == [BEST, BEST, *[{**BEST, "num_stages": 4}] * 2]
    heuristic = fused_moe_triton_config.get_default_config(100, 32, 32, 64, 4, None, False)
    assert [choose(tokens) for tokens in (65, 100, 4096)] == [heuristic] * 3


def test_one_record_is_of_one_policy(tmp_path, timed):
    record = write_record(tmp_path, "tune", {"policy": {"policy": "oea:k0=3"}})
    with pytest.raises(ValueError, match=rf"policy {POLICY}: .*tune\.json is of oea:k0=3"):
        measure(record, [])
    with pytest.raises(ValueError, match="k0"):
        measure(write_record(tmp_path / "other", "tune", {}), [], policy="oea:k0=-1")
    assert not (tmp_path / "other").exists()
    assert timed == []


def tuned(us, own_us, active, config=BEST, finished=True):
    return {
        "active": active,
        "expert_bytes": 9437184,
        "own_us": own_us,
        "us": us,
        "config": config,
        "finished": finished,
    }


def test_the_table_has_both_times_the_bandwidth_and_the_bar():
    points = {
        "policy": {"policy": POLICY},
        "copy": {"gb_per_s": 4000.0},
        "qwen3-30b-a3b/tokens=16": tuned(90.0, 120.0, 32.5),
        "qwen3-30b-a3b/tokens=64": tuned(200.0, 200.0, 40.0, config=None),
        "qwen3-30b-a3b/active=24": tuned(70.0, 82.0, 24, finished=False),
        "gpt-oss-20b/active=24": tuned(70.0, 82.0, 24),
    }
    small, large, aim, other = rows(points)
    # 32.5 x 9.437184 MB in 90 us: 3408 GB/s of 4000
    assert small.what == "qwen3-30b-a3b, 16 tokens, 32.5 experts"
    assert small.measured == "120.0 -> 90.0 us, 3408 GB/s, 85.2 % of the copy"
    assert large.measured == "200.0 us as it was, 1887 GB/s, 47.2 % of the copy"
    # 24 x 9.437184 MB in 70 us: 3236 GB/s
    assert aim.what == ("qwen3-30b-a3b, tuned at 24 experts, 16 tokens, 82.0 -> 70.0 us, 3236 GB/s, search cut short")
    assert (aim.measured, aim.bar, aim.verdict) == ("80.9 % of the copy", "at least 80 % of the copy", "pass")
    assert (other.bar, other.verdict) == ("", "")
