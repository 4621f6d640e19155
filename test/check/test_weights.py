"""Bytes of a model by its config.json, counted by hand; what one GPU holds of them, and what does not fit it."""

import json

import pytest

from benchmark.gpu.models import COMMON, CONFIGS
from check.asking import QWEN, say
from sglang_xshare.check.weights import read_weights

pytestmark = pytest.mark.usefixtures("served")


def test_the_bytes_of_qwen3_30b_a3b(write):
    weights = read_weights(write(QWEN))
    assert weights.expert == 3 * 2048 * 768 * 2 == 9437184
    assert weights.moe_layers == 48
    attention = 2048 * (32 + 2 * 4 + 32) * 128
    assert weights.dense == (48 * (attention + 2048 * 128) + 2048 * 151936) * 2
    assert weights.cache == 48 * 2 * 4 * 128 * 2


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "fp8", "routed_experts_quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
    ],
)
def test_bits_a_weight_by_quantization(quantization, bits, write):
    weights = read_weights(write(QWEN | {"quantization_config": quantization}))
    assert (weights.bits, weights.expert) == (bits, 3 * 2048 * 768 * bits / 8)


def test_the_bytes_of_deepseek_v4_flash(write):
    """Published are 284 billion weights, 13 of them a token's."""
    shape = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "vocab_size": 129280,
        "expert_dtype": "fp4",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    weights = read_weights(write(shape))
    assert (weights.bits, weights.expert) == (4.25, 3 * 4096 * 2048 * 4.25 / 8)
    attention = 4096 * 1024 + 1024 * 64 * 512 + 4096 * 512 + 64 * 512 * 1024 + 8 * 1024 * 4096
    assert weights.dense == 43 * (attention + 3 * 4096 * 2048 + 4096 * 256) + 4096 * 129280 * 2
    assert weights.cache == 43 * 512 * 2
    del shape["expert_dtype"], shape["quantization_config"]
    plain = read_weights(write(shape))
    assert round((43 * 256 * plain.expert + plain.held) / 2e9) == 284
    assert round((43 * 6 * plain.expert + plain.dense) / 2e9) == 13


def test_dense_layers_and_shared_experts_are_counted(write):
    base = read_weights(write(QWEN))
    some = read_weights(write(QWEN | {"mlp_only_layers": [0, 5]}))
    assert some.moe_layers == 46
    assert some.dense - base.dense == 2 * (3 * 2048 * 6144 - 2048 * 128) * 2
    shared = read_weights(write(QWEN | {"shared_expert_intermediate_size": 512}))
    assert shared.dense - base.dense == 48 * 3 * 2048 * 512 * 2
    assert read_weights(write(QWEN | {"decoder_sparse_step": 2})).moe_layers == 24
    assert read_weights(write(QWEN | {"first_k_dense_replace": 3})).moe_layers == 45


CHECKPOINTS = {"qwen3-30b-a3b": 61.06e9, "gpt-oss-120b": 65.25e9, "gpt-oss-20b": 13.76e9}
"""Bytes of the published checkpoints: 30.53 billion weights in bf16; OpenAI's 60.8 and 12.8 GiB."""


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_are_the_published_checkpoints(name, write, capsys):
    assert say("--model", write(COMMON | CONFIGS[name]), "--gpu", "h100", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    weights, memory = report["weights"], report["memory"]
    assert weights["total_bytes"] == pytest.approx(CHECKPOINTS[name], rel=0.005)
    assert weights["gpu_bytes"] == weights["total_bytes"]
    assert memory["left_bytes"] == pytest.approx(80 * 2**30 - weights["total_bytes"])
    assert memory["cache_tokens"] == int(memory["left_bytes"] / weights["cache_bytes_per_token"])


def test_what_does_not_fit_is_not_served(write, capsys):
    asked = ("--model", write(QWEN), "--gpu", "rtx4090", "--mem-fraction-static", 0.9)
    assert say(*asked, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["verdict"], report["served"], report["memory"]["fits"]) == ("does not fit", False, False)
    experts, others = 48 * 128 * 9437184, read_weights(write(QWEN)).held
    assert report["memory"]["resident_experts"] == int((0.9 * 24 * 2**30 - others) / (experts / 128)) == 44
    assert say(*asked) == 1
    assert "44 of 128 experts a layer would fit resident" in capsys.readouterr().out
    assert say(*asked, "--batch", 16, "--context", 8192, "--json") == 1
    out, err = capsys.readouterr()
    cached = 16 * 8192 * 48 * 2 * 4 * 128 * 2
    assert json.loads(out)["memory"]["resident_experts"] == int((0.9 * 24 * 2**30 - others - cached) / (experts / 128))
    assert err == "check: not answered: the time of a step: the weights do not fit\n"
    assert "step_ms" not in json.loads(out)["estimate"]["estimates"][0]
    assert say(*asked, "--cpu-offload-gb", 64) == 0, "they lie elsewhere"


@pytest.mark.parametrize(("slots", "fits"), [(32, True), (120, False)])
def test_slots_of_paged_experts_are_what_a_gpu_holds(slots, fits, write, capsys):
    paged = ("--enable-paged-experts", "--paged-experts-num-resident", slots)
    assert say("--model", write(QWEN), "--gpu", "rtx4090", *paged, "--json") == int(not fits)
    report = json.loads(capsys.readouterr().out)
    held = read_weights(write(QWEN)).held
    assert report["weights"]["gpu_bytes"] == 48 * slots * 9437184 + held
    assert (report["memory"]["fits"], 40 < report["memory"].get("resident_experts", 41) < 120) == (fits, True)


def test_ranks_divide_the_weights(write, capsys):
    assert say("--model", write(QWEN), "--gpu", "rtx4090", "--tp", 4, "--json") == 0
    weights = json.loads(capsys.readouterr().out)["weights"]
    assert weights["gpu_bytes"] == pytest.approx(weights["total_bytes"] / 4)
    assert weights["cache_bytes_per_token"] == 48 * 2 * 128 * 2, "one of four heads"
    flags = ("--tp", 4, "--ep-size", 4, "--dp-size", 4, "--enable-dp-attention")
    assert say("--model", write(QWEN), "--gpu", "rtx4090", *flags, "--json") == 0
    weights = json.loads(capsys.readouterr().out)["weights"]
    assert weights["gpu_bytes"] == pytest.approx(weights["all_experts_bytes"] / 4 + weights["other_bytes"])
