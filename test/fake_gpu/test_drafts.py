"""Drafters of CUDA alone, on a GPU that is not there: verification selects in captured graphs, drafts do not."""

import pytest

from benchmark.common.paths import TRAINED
from fake_gpu.checks import SINCE_0_5_23, check, count_steps, list_selecting
from fake_gpu.models import write_model
from fake_gpu.server import FEW_GRAPHS
from served.adapter import write_adapter

pytestmark = SINCE_0_5_23
WEIGHED = ("--expert-policy", "xshare", "--expert-policy-config", '{"k0": 1, "add": 4, "acceptance": 0.5}')


@pytest.mark.parametrize("algorithm", ["DFLASH", "DSPARK"])
def test_verification_of_blocks_selects(algorithm, serve, tmp_path):
    draft = write_model(f"qwen3-moe-{algorithm.lower()}", tmp_path)
    drafting = ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft))
    server = serve("qwen3-moe", *WEIGHED, *FEW_GRAPHS, *drafting)
    assert count_steps(server.generate(3)) == {(7, 7)}
    metas = server.generate(4, exact=(1,))
    assert [meta["expert_policy"]["steps"] for meta in metas] == [7, 0, 7, 7]
    server.switch({"policy": "vanilla"})
    assert count_steps(server.generate(3)) == {(0, 7)}
    assert list_selecting(server) == [0, 0, 3, 3], "the draft's graphs, and those of the target's sizes"
    check(server, 3)


def test_a_model_that_drafts_with_an_adapter_selects_where_it_verifies(serve, tmp_path):
    """UNO, whose drafts are forwards of the target with an adapter, in the mode of verification."""
    adapter = write_adapter(TRAINED, tmp_path / "adapter", ("q_proj", "k_proj", "v_proj"), rank=4)
    drafting = ("--speculative-algorithm", "UNO", "--uno-lora-path", str(adapter), "--attention-backend", "fa3")
    server = serve(TRAINED, *WEIGHED, *FEW_GRAPHS, *drafting, "--speculative-num-draft-tokens", "4")
    metas = server.generate(3)
    assert all(0 < steps == total for steps, total in count_steps(metas)), metas
    body = {"input_ids": [1, 2, 3], "sampling_params": {"custom_params": {"expert_policy": "exact"}}}
    answer = server.post("/generate", body)
    assert (answer.status_code, "--speculative-algorithm UNO" in answer.text) == (400, True)
    assert list_selecting(server) == [0, 0, 4, 4], "each size is captured for drafts and for verification"
    check(server, 4)
