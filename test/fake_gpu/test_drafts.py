"""Drafters of CUDA alone, on a GPU that is not there: verification selects in captured graphs, drafts do not. Each
depth of drafts that adapt has captured graphs of its own, which a policy and a switch follow.
"""

import json

import pytest

from benchmark.common.paths import TRAINED
from fake_gpu.checks import SINCE_0_5_23, check, count_steps
from fake_gpu.models import write_model
from served.adapter import write_adapter

pytestmark = SINCE_0_5_23
WEIGHED = ("--expert-policy", "xshare", "--expert-policy-config", '{"k0": 1, "add": 4, "acceptance": 0.5}')
GRAPHS = ("--cuda-graph-bs-decode", "1", "4", "--disable-prefill-cuda-graph")
LAYERS = 3
DEPTHS, TOKENS = [0, 1, 2], 64
"""No draft is accepted: each request verifies once for each of its tokens, more often than the trials of all depths."""


def list_selecting(server):
    """How many layers each captured graph selects in."""
    return sorted(kernels["select_kernel"] for kernels in server.read_captures())


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_verification_of_blocks_selects(algorithm, serve, tmp_path):
    draft = write_model(f"qwen3-moe-{algorithm.lower()}", tmp_path)
    drafting = ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft))
    server = serve("qwen3-moe", *WEIGHED, *GRAPHS, *drafting)
    assert count_steps(server.generate(3)) == {(7, 7)}
    metas = server.generate(4, exact=(1,))
    assert [meta["expert_policy"]["steps"] for meta in metas] == [7, 0, 7, 7]
    assert server.post("/expert_policy", {"policy": "vanilla"}).status_code == 200
    assert count_steps(server.generate(3)) == {(0, 7)}
    assert list_selecting(server) == [0, 0, 3, 3], "the draft's graphs, and those of the target's sizes"
    check(server, 3)


def test_a_model_that_drafts_with_an_adapter_selects_where_it_verifies(serve, tmp_path):
    """UNO, whose drafts are forwards of the target, in the mode of verification."""
    adapter = write_adapter(TRAINED, tmp_path / "adapter", ("q_proj", "k_proj", "v_proj"), rank=4)
    drafting = ("--speculative-algorithm", "UNO", "--uno-lora-path", str(adapter), "--attention-backend", "fa3")
    server = serve(TRAINED, *WEIGHED, *GRAPHS, *drafting, "--speculative-num-draft-tokens", "4")
    metas = server.generate(3)
    assert all(0 < steps == total for steps, total in count_steps(metas)), metas
    body = {"input_ids": [1, 2, 3], "sampling_params": {"custom_params": {"expert_policy": "exact"}}}
    answer = server.post("/generate", body)
    assert (answer.status_code, "--speculative-algorithm UNO" in answer.text) == (400, True)
    assert list_selecting(server) == [0, 0, 4, 4], "each size is captured for drafts and for verification"
    check(server, 4)


def read_sizes(server):
    return {one["batch_size"]: one for one in server.get("/expert_policy")["draft_depth"]["batch_sizes"]}


def test_the_depth_changes_across_captured_graphs_with_a_policy_and_a_switch_between(serve, tmp_path):
    draft = write_model("qwen3-moe-eagle3", tmp_path)
    candidates = tmp_path / "candidates.json"
    candidates.write_text(json.dumps({"1": {"candidate_steps": DEPTHS[1:]}}))
    drafting = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "2", "--speculative-eagle-topk", "1"]
    drafting += ["--speculative-num-draft-tokens", "3", "--speculative-draft-model-path", str(draft)]
    drafting += ["--speculative-adaptive", "--speculative-adaptive-config", str(candidates)]
    server = serve("qwen3-moe", "--expert-policy", "xshare:k0=1,add=24", *GRAPHS, *drafting)
    metas = server.generate(3, tokens=TOKENS)
    assert all(steps == total for steps, total in count_steps(metas)), metas
    before = read_sizes(server)
    assert list(before) == [4], "three requests run in a graph of four"
    assert [one["depth"] for one in before[4]["by_depth"]] == DEPTHS
    assert before[4]["depth"] == 0, "no draft is accepted"
    answer = server.post("/expert_policy", {"policy": "xshare", "k0": 1, "add": 8})
    assert (answer.status_code, answer.json()["recaptured"]) == (200, False), answer.text
    server.generate(3, tokens=TOKENS)
    after = read_sizes(server)
    assert [one["depth"] for one in after[4]["by_depth"]] == DEPTHS, "measured again"
    assert after[4]["verifications"] > before[4]["verifications"]
    assert ", draft depth 0" in server.read_output()
    captures = len(server.read_captures())
    answer = server.post("/expert_policy", {"policy": "xshare", "k0": 1, "mass": 0.9})
    assert (answer.status_code, answer.json()["recaptured"]) == (200, True), answer.text
    again = [kernels["select_kernel"] for kernels in server.read_captures()[captures:]]
    # The target's graphs of two sizes for each depth, and no draft's. One request without a draft is one row: vanilla.
    assert sorted(again) == [0] + [LAYERS] * (2 * len(DEPTHS) - 1)
    metas = server.generate(3, tokens=TOKENS)
    assert all(steps == total for steps, total in count_steps(metas)), metas
    assert [one["depth"] for one in read_sizes(server)[4]["by_depth"]] == DEPTHS, "measured again"
    check(server, LAYERS, sizes=len(DEPTHS) * 3 * 2)
