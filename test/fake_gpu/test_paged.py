"""Paged experts in decode graphs that the plan's bound allows: captured, padded, replayed, left out, or the end."""

import json

import pytest
import requests
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmark.common.paths import TRAINED
from fake_gpu.checks import NEEDS_PAGING, check, check_records, count_steps
from fake_gpu.models import write_model
from fake_gpu.server import XSHARE

pytestmark = NEEDS_PAGING
LAYERS = 4
PAGED = ("--enable-paged-experts", "--paged-experts-num-resident", "32")


def count_captured(server):
    """How many graphs decide on the device which experts to page in."""
    return sum(any("decide" in kernel for kernel in kernels) for kernels in server.read_captures())


def count_eager(server):
    """Decode lines of the log that say that no graph was replayed."""
    return server.read_output().count("cuda graph: False, gen throughput")


def test_graphs_are_captured_as_far_as_all_experts_fit(serve):
    sizes = ("1", "4", "8", "16")
    server = serve(TRAINED, *PAGED, *XSHARE, "--cuda-graph-bs-decode", *sizes, "--disable-prefill-cuda-graph")
    assert count_captured(server) == len(sizes), "SGLang alone captures up to K // top_k = 4"
    for rows, steps in ((7, 7), (16, 7), (12, 7), (1, 7)):
        assert count_steps(server.generate(rows)) == {(steps, 7)}
    assert count_eager(server) == 0
    server.switch({"policy": "vanilla"})
    server.generate(3)
    assert count_eager(server) == 0, "whatever four rows take fits the slots"
    assert count_steps(server.generate(7, 12)) == {(0, 11)}
    eager = count_eager(server)
    assert eager > 0, "seven rows may take more experts than there are slots: in waves"
    server.switch({"policy": "xshare", "k0": 1, "add": 2})
    assert count_steps(server.generate(7, 12)) == {(11, 11)}
    assert count_eager(server) == eager
    check(server, LAYERS, len(sizes))


def test_switches_that_graphs_cannot_follow_capture_the_sizes_that_fit(serve, tmp_path):
    """SGLang refuses to capture more than 4 rows under observe: 8 may take 64 experts of 32 slots."""
    graphs = ("--cuda-graph-bs-decode", "8", "16", "--disable-prefill-cuda-graph")
    server = serve(TRAINED, *PAGED, *XSHARE, *graphs, "--expert-policy-trace", str(tmp_path / "trace"))
    observe = {"policy": "observe", "plans": ["xshare:k0=1,add=4"]}
    for policy, recaptured, captured in (
        ({"policy": "vanilla"}, False, [8, 16]),
        (observe, True, [4]),
        ({"policy": "xshare", "k0": 1, "add": 4}, True, [8, 16]),
        (observe, True, [4]),
    ):
        answer = server.switch(policy)
        assert (answer["recaptured"], answer["limits"]["captured_rows"]) == (recaptured, captured)
        server.generate(7)
    check(server, LAYERS, 2 * 2)


def test_graphs_grow_beyond_the_largest_of_the_start(serve):
    """Under observe 4 rows fit 32 slots. The buffers of SGLang's graphs were made for these."""
    graphs = ("--cuda-graph-bs-decode", "8", "16", "--disable-prefill-cuda-graph")
    plans = json.dumps({"plans": ["xshare:k0=1,add=4"]})
    server = serve(TRAINED, *PAGED, "--expert-policy", "observe", "--expert-policy-config", plans, *graphs)
    assert count_captured(server) == 1
    for policy, recaptured, captured in (
        ({"policy": "xshare", "k0": 1, "add": 4}, True, [8, 16]),
        ({"policy": "vanilla"}, False, [8, 16]),
        ({"policy": "xshare", "k0": 1, "add": 6}, False, [8, 16]),
    ):
        answer = server.switch(policy)
        assert (answer["recaptured"], answer["limits"]["captured_rows"]) == (recaptured, captured)
    eager = count_eager(server)
    assert count_steps(server.generate(14, 12)) == {(11, 11)}
    assert count_eager(server) == eager
    check(server, LAYERS, 2 * 2)


def test_without_a_policy_graphs_are_sglangs(serve):
    server = serve(TRAINED, *PAGED, "--cuda-graph-bs-decode", "1", "4", "8", "16", "--disable-prefill-cuda-graph")
    assert count_captured(server) == 2
    server.generate(7)
    check(server, 0)


def serve_small(serve, tmp_path, keys, **environment):
    """A server of 6 slots and graphs of 4 rows, whose selections are computed and told."""
    model = write_model("qwen3-moe-small", tmp_path)
    # SGLang refuses dummy weights with paged experts. Nothing computes with these.
    drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.bfloat16)
    drawn.save_pretrained(tmp_path / "weights")
    (tmp_path / "weights" / "model.safetensors").rename(model / "model.safetensors")
    slots = ("--enable-paged-experts", "--paged-experts-num-resident", "6")
    plan = ("--expert-policy", "xshare", "--expert-policy-config", json.dumps(keys))
    graphs = ("--cuda-graph-bs-decode", "4", "--disable-prefill-cuda-graph")
    values = {"FAKE_GPU_VALUES": "ours", "FAKE_GPU_PROBE": str(tmp_path / "probe")}
    return serve(model, *slots, *plan, *graphs, **values, **environment)


def test_every_step_selects_by_the_plan_in_force(serve, tmp_path):
    """In graphs, in the eager steps of their size under a plan that may exceed the slots, and in graphs again."""
    server, seen = serve_small(serve, tmp_path, {"k0": 1, "add": 2, "free_residents": False}), 0
    for k0, graphs in ((1, True), (3, False), (1, True), (3, False)):
        keys = {"k0": k0, "add": 2, "free_residents": False}
        server.switch({"policy": "xshare", **keys})
        before = count_eager(server)
        server.generate(4, 12)
        assert (count_eager(server) == before) == graphs
        records = [json.loads(line) for line in (tmp_path / "probe").read_text().splitlines()]
        assert len(records) > seen
        check_records(records[seen:], "xshare", keys)
        seen = len(records)
    check(server)


def test_a_broken_bound_stops_the_server(serve, tmp_path):
    """Selections that have forgotten the slots count what exceeds them in a replay, and the next report ends it."""
    server = serve_small(serve, tmp_path, {"k0": 1, "add": 8}, FAKE_GPU_FORGET="1")
    with pytest.raises(requests.RequestException):
        server.generate(4, 12)
    assert "SlotsExceeded: more than 6 experts were active in MoE layers [0, 1]" in server.read_output()
    active = [sum(record["active"]) for record in map(json.loads, (tmp_path / "probe").read_text().splitlines())]
    assert max(active) > 6
