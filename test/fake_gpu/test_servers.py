"""`make test-cuda`: SGLang for CUDA on a GPU that is not there: graphs are captured, padded, replayed and switched.

Kernels compute nothing here, so answers mean nothing. The tests check the host: it does nothing that a capture forbids,
waits for the device only for counters and switches, and frees no memory that a graph keeps.
"""

import json

import pytest

from benchmark.common.paths import TRAINED
from fake_gpu.checks import SINCE_0_5_23, check, count_steps, list_selecting
from fake_gpu.server import FEW_GRAPHS, ONE_POOL, XSHARE, draft_eagle3

GRAPHS = ("--cuda-graph-bs-decode", "1", "4", "8", "--disable-prefill-cuda-graph")
LAYERS = {"qwen3-moe": 3, "gpt-oss": 4, "deepseek-v3": 2, "glm-4-moe": 2}
RECENT = {"deepseek-v4": 3, "minimax-m3": 2, "kimi-k3": None}
"""Of DeepSeek-V4's four layers the first routes by a hash. None: the 896 experts of Kimi K3 are more than the kernel
takes, and torch selects.
"""
FLAGS = {
    "deepseek-v4": ("--max-total-tokens", "65536"),  # a tenth of them is its window's, in pages of 256: one a request
    "gpt-oss": ONE_POOL,
    "minimax-m3": ("--page-size", "128"),  # as SGLang has it beside its own choice of attention there
}


@pytest.mark.parametrize("model", [*LAYERS, *(pytest.param(name, marks=SINCE_0_5_23) for name in RECENT)])
def test_a_policy_in_graphs(serve, model):
    server = serve(model, *XSHARE, *GRAPHS, *FLAGS.get(model, ()))
    assert count_steps(server.generate(7)) == {(7, 7)}  # in graphs of eight rows
    assert count_steps(server.generate(4)) == {(7, 7)}
    assert count_steps(server.generate(12)) == {(7, 7)}  # of no graph
    assert count_steps(server.generate(1)) == {(0, 7)}
    check(server, (LAYERS | RECENT)[model])


def test_no_policy(serve):
    server = serve("qwen3-moe", *GRAPHS)
    assert "expert_policy" not in server.generate(7)[0]
    check(server, 0)


def test_switches(serve):
    server = serve("qwen3-moe", *XSHARE, *GRAPHS)
    for policy, steps in (
        ({"policy": "xshare", "k0": 1, "add": 2}, 7),
        ({"policy": "vanilla"}, 0),
        ({"policy": "xshare", "k0": 1, "add": 6}, 7),
    ):
        server.switch(policy)
        assert count_steps(server.generate(7)) == {(steps, 7)}
    refused = {"policy": "lynx-acc", "confidence": 0.5, "recapture": False}
    assert server.post("/expert_policy", refused).status_code == 400
    assert count_steps(server.generate(7)) == {(7, 7)}
    check(server, LAYERS["qwen3-moe"])


def test_a_pool_of_a_size_that_no_list_has(serve):
    """SGLang captures it beside those of the list that are smaller, and its graph follows a switch as theirs do."""
    server = serve("qwen3-moe", *XSHARE, *GRAPHS, "--max-running-requests", "6")
    assert server.get("/expert_policy")["limits"]["captured_rows"] == [1, 4, 6]
    answer = server.switch({"policy": "xshare", "k0": 1, "add": 2})
    assert (answer["recaptured"], answer["add"]) == (False, 2)
    assert count_steps(server.generate(5)) == {(7, 7)}
    check(server, LAYERS["qwen3-moe"])


def test_weights_are_updated_and_graphs_captured_anew(serve):
    server = serve(TRAINED, *XSHARE, *GRAPHS)
    server.switch({"policy": "vanilla"})
    body = {"model_path": str(TRAINED), "load_format": "auto", "recapture_cuda_graph": True}
    answer = server.post("/update_weights_from_disk", body)
    assert answer.status_code == 200, answer.text
    server.switch({"policy": "xshare", "k0": 1, "add": 6})
    assert count_steps(server.generate(7)) == {(7, 7)}
    assert sum(map(bool, list_selecting(server))) == 4  # the sizes 4 and 8, both times
    check(server, 4)


@pytest.mark.parametrize("policy", ["oea:k0=3", "lynx-acc:confidence=0.5"])
def test_other_policies(serve, policy):
    server = serve("qwen3-moe", "--expert-policy", policy, *GRAPHS)
    assert count_steps(server.generate(7)) == {(7, 7)}
    check(server, LAYERS["qwen3-moe"])


def test_observe(serve):
    plans = {"plans": ["xshare:k0=1,add=4", "oea:k0=3"]}
    server = serve("qwen3-moe", "--expert-policy", "observe", "--expert-policy-config", json.dumps(plans), *GRAPHS)
    assert count_steps(server.generate(7)) == {(0, 7)}
    server.switch({"policy": "observe", **plans})
    server.generate(7)
    check(server)
    selecting = list_selecting(server)
    assert selecting == [3, 6, 6], "two plans in three layers; of one row both leave the model's routing, selected once"


def test_a_trace(serve, tmp_path):
    trace = tmp_path / "trace"
    server = serve("qwen3-moe", *XSHARE, *GRAPHS, "--expert-policy-trace", str(trace))
    server.generate(7, 24)
    server.switch({"policy": "vanilla"})
    server.generate(7, 24)
    check(server, LAYERS["qwen3-moe"])
    assert trace.exists()


def test_the_defaults_of_the_release(serve):
    """Graphs of every size, of prefills too."""
    server = serve("qwen3-moe", *XSHARE)
    assert count_steps(server.generate(7)) == {(7, 7)}
    check(server, LAYERS["qwen3-moe"], sizes=16)


def test_programs_that_wait_for_each_other_are_launched_together(serve):
    """Several select for more than 16 rows."""
    large = ("--cuda-graph-bs-decode", "1", "64", "--disable-prefill-cuda-graph", "--max-running-requests", "64")
    server = serve("qwen3-moe", *XSHARE, *large)
    assert count_steps(server.generate(20)) == {(7, 7)}
    check(server)
    selecting = [{name: n for name, n in one.items() if "select" in name} for one in server.read_captures()]
    assert {"select_kernel cooperative": LAYERS["qwen3-moe"]} in selecting, selecting


def test_eagle3_in_a_server(serve, tmp_path):
    server = serve("qwen3-moe", *XSHARE, *FEW_GRAPHS, *draft_eagle3(tmp_path))
    metas = server.generate(3)
    assert all(steps == total for steps, total in count_steps(metas)), metas
    check(server, LAYERS["qwen3-moe"])
