"""Paged experts in decode graphs beyond K // top_k, which the plan's bound allows: captured, padded, replayed, left out
after a switch that lifts the bound; and a bound that is broken stops the server.
"""

import json

import pytest
import requests

from benchmark.common.paths import TRAINED
from benchmark.gpu.models import PAGED_SINCE
from benchmark.gpu.weights import write_weights
from fake_gpu.models import write_model
from fake_gpu.test_servers import check, count_steps
from sglang_xshare.patching.release import is_since
from sglang_xshare.patching.tree import find_tree

PAGES = is_since(find_tree().release, PAGED_SINCE)
NEEDS_PAGING = pytest.mark.skipif(not PAGES, reason=f"SGLang pages experts from {PAGED_SINCE} on")
pytestmark = NEEDS_PAGING
LAYERS = 4
PAGED = ("--enable-paged-experts", "--paged-experts-num-resident", "32")
XSHARE = ("--expert-policy", "xshare", "--expert-policy-config", '{"k0": 1, "add": 4}')


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
    assert server.post("/expert_policy", {"policy": "vanilla"}).status_code == 200
    server.generate(3)
    assert count_eager(server) == 0, "whatever four rows take fits the slots"
    assert count_steps(server.generate(7, 12)) == {(0, 11)}
    eager = count_eager(server)
    assert eager > 0, "seven rows may take more experts than there are slots: in waves"
    assert server.post("/expert_policy", {"policy": "xshare", "k0": 1, "add": 2}).status_code == 200
    assert count_steps(server.generate(7, 12)) == {(11, 11)}
    assert count_eager(server) == eager
    check(server, LAYERS, len(sizes))


def test_without_a_policy_graphs_are_sglangs(serve):
    server = serve(TRAINED, *PAGED, "--cuda-graph-bs-decode", "1", "4", "8", "16", "--disable-prefill-cuda-graph")
    assert count_captured(server) == 2
    server.generate(7)
    check(server, 0)


def test_a_broken_bound_stops_the_server(serve, tmp_path):
    """Selections that have forgotten the slots count what exceeds them in a replay, and the next report ends it."""
    model = write_model("qwen3-moe-small", tmp_path)
    write_weights(model, json.loads((model / "config.json").read_text()))
    slots = ("--enable-paged-experts", "--paged-experts-num-resident", "6")
    plan = ("--expert-policy", "xshare", "--expert-policy-config", '{"k0": 1, "add": 8}')
    graphs = ("--cuda-graph-bs-decode", "4", "--disable-prefill-cuda-graph")
    lie = {"FAKE_GPU_VALUES": "ours", "FAKE_GPU_FORGET": "1", "FAKE_GPU_PROBE": str(tmp_path / "probe")}
    server = serve(model, *slots, *plan, *graphs, **lie)
    with pytest.raises(requests.RequestException):
        server.generate(4, 12)
    assert "SlotsExceeded: more than 6 experts were active in MoE layers [0, 1]" in server.read_output()
    active = [sum(record["active"]) for record in map(json.loads, (tmp_path / "probe").read_text().splitlines())]
    assert max(active) > 6
