"""Draft depths on a GPU that is not there: each has captured graphs of its own, which a policy and a switch follow."""

import json

from fake_gpu.checks import SINCE_0_5_23, check, count_steps
from fake_gpu.server import FEW_GRAPHS, draft_eagle3
from fake_gpu.test_servers import LAYERS

pytestmark = SINCE_0_5_23
DEPTHS = [0, 1, 2]
STEPS = 64
"""No draft is accepted: each request verifies once for each of its tokens, more often than the trials of all depths."""


def read_sizes(server):
    return {one["batch_size"]: one for one in server.get("/expert_policy")["draft_depth"]["batch_sizes"]}


def test_the_depth_changes_across_captured_graphs_with_a_policy_and_a_switch_between(serve, tmp_path):
    candidates = tmp_path / "candidates.json"
    candidates.write_text(json.dumps({"1": {"candidate_steps": DEPTHS[1:]}}))
    adapting = ("--speculative-adaptive", "--speculative-adaptive-config", str(candidates))
    flags = (*FEW_GRAPHS, *draft_eagle3(tmp_path), *adapting)
    server = serve("qwen3-moe", "--expert-policy", "xshare:k0=1,add=24", *flags)
    metas = server.generate(3, tokens=STEPS)
    assert all(steps == total for steps, total in count_steps(metas)), metas
    before = read_sizes(server)
    assert list(before) == [4], "three requests run in a graph of four"
    assert [one["depth"] for one in before[4]["by_depth"]] == DEPTHS
    assert before[4]["depth"] == 0, "no draft is accepted"
    assert server.switch({"policy": "xshare", "k0": 1, "add": 8})["recaptured"] is False
    server.generate(3, tokens=STEPS)
    after = read_sizes(server)
    assert [one["depth"] for one in after[4]["by_depth"]] == DEPTHS, "measured again"
    assert after[4]["verifications"] > before[4]["verifications"]
    assert ", draft depth 0" in server.read_output()
    captures = len(server.read_captures())
    assert server.switch({"policy": "xshare", "k0": 1, "mass": 0.9})["recaptured"] is True
    again = [kernels["select_kernel"] for kernels in server.read_captures()[captures:]]
    # The target's graphs of two sizes for each depth, and no draft's. One request without a draft is one row: vanilla.
    assert sorted(again) == [0] + [LAYERS["qwen3-moe"]] * (2 * len(DEPTHS) - 1)
    metas = server.generate(3, tokens=STEPS)
    assert all(steps == total for steps, total in count_steps(metas)), metas
    assert [one["depth"] for one in read_sizes(server)[4]["by_depth"]] == DEPTHS, "measured again"
    check(server, LAYERS["qwen3-moe"], sizes=len(DEPTHS) * 3 * 2)
