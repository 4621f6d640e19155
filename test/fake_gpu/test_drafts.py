"""Drafters of CUDA alone, on a GPU that is not there: verification selects in captured graphs, drafts do not."""

import json

import pytest
import torch
from safetensors.torch import save_file

from benchmark.common.paths import TRAINED
from fake_gpu.checks import SINCE_0_5_23, check, count_steps
from fake_gpu.models import write_model

pytestmark = SINCE_0_5_23
WEIGHED = ("--expert-policy", "xshare", "--expert-policy-config", '{"k0": 1, "add": 4, "acceptance": 0.5}')
GRAPHS = ("--cuda-graph-bs-decode", "1", "4", "--disable-prefill-cuda-graph")


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


def write_adapter(folder):
    """UNO's draft: the trained checkpoint with an adapter of random numbers on its attention."""
    config = json.loads((TRAINED / "config.json").read_text())
    width, heads, shared = (config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    rows = {"q_proj": heads * config["head_dim"], "k_proj": shared * config["head_dim"]}
    rows["v_proj"] = rows["k_proj"]
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, count in rows.items():
            of = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{of}.lora_A.weight"] = torch.randn(4, width)
            tensors[f"{of}.lora_B.weight"] = torch.randn(count, 4)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(given | {"target_modules": list(rows)}))
    return folder


def test_a_model_that_drafts_with_an_adapter_selects_where_it_verifies(serve, tmp_path):
    """UNO, whose drafts are forwards of the target, in the mode of verification."""
    adapter = write_adapter(tmp_path / "adapter")
    drafting = ("--speculative-algorithm", "UNO", "--uno-lora-path", str(adapter), "--attention-backend", "fa3")
    server = serve(TRAINED, *WEIGHED, *GRAPHS, *drafting, "--speculative-num-draft-tokens", "4")
    metas = server.generate(3)
    assert all(0 < steps == total for steps, total in count_steps(metas)), metas
    body = {"input_ids": [1, 2, 3], "sampling_params": {"custom_params": {"expert_policy": "exact"}}}
    answer = server.post("/generate", body)
    assert (answer.status_code, "--speculative-algorithm UNO" in answer.text) == (400, True)
    assert list_selecting(server) == [0, 0, 4, 4], "each size is captured for drafts and for verification"
    check(server, 4)
