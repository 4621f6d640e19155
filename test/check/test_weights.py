"""Bytes of a model by its modules and its quantization; what one GPU holds of them, and what does not fit it."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark.gpu.models import COMMON, CONFIGS
from check.asking import QWEN, say
from check.published import read_shape
from compatibility.configured import pack
from sglang_xshare.check.server import read_flags
from sglang_xshare.check.weights import Weights, count_cache, count_held, read_weights

pytestmark = pytest.mark.usefixtures("served")


def test_the_bytes_of_qwen3_30b_a3b(write):
    weights = read_weights(write(QWEN))
    assert weights.expert == 3 * 2048 * 768 * 2 == 9437184
    assert (weights.moe_layers, weights.cache) == (48, 48 * 2 * 4 * 128 * 2)
    attention, norms = 2048 * (32 + 2 * 4 + 32) * 128, 2 * 2048 + 2 * 128
    assert weights.dense == (48 * (attention + 2048 * 128 + norms) + 2048 + 2048 * 151936) * 2


def test_bits_a_weight_by_quantization(write):
    for quantization, bits in (
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "fp8", "routed_experts_quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        # Of compressed-tensors those of the first group.
        (pack(type="int", num_bits=4, group_size=32), 4.5),
        (pack(type="float", num_bits=4, group_size=16), 4.5),
        (pack(type="float", num_bits=8, group_size=None), 8),
    ):
        weights = read_weights(write(QWEN | {"quantization_config": quantization}))
        assert (quantization, weights.bits, weights.expert) == (quantization, bits, 3 * 2048 * 768 * bits / 8)


def test_mxfp4_is_of_experts_alone(write):
    """All else of gpt-oss is in bfloat16; of DeepSeek-V4 in fp8."""
    plain = read_weights(write(QWEN))
    mixed = read_weights(write(QWEN | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert (mixed.expert, mixed.dense) == (plain.expert * 4.25 / 16, plain.dense)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    flash = read_shape("DeepSeek-V4") | {"expert_dtype": "fp4", "quantization_config": quantization}
    weights = read_weights(write(flash))
    assert (weights.bits, weights.expert) == (4.25, 3 * 4096 * 2048 * 4.25 / 8)
    assert 0.5 < weights.dense / read_weights(write(read_shape("DeepSeek-V4"))).dense < 0.6


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules"])
@pytest.mark.parametrize("pattern", ["self_attn", "model.layers.*.self_attn", "re:.*self_attn.*"])
def test_modules_that_stay_as_they_are_keep_their_bytes(key, pattern, write):
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    all_of_it = read_weights(write(QWEN | {"quantization_config": fp8}))
    some = read_weights(write(QWEN | {"quantization_config": fp8 | {key: [pattern, "lm_head"]}}))
    assert some.dense - all_of_it.dense == 48 * 2048 * (32 + 2 * 4 + 32) * 128
    assert some.dense == read_weights(write(QWEN)).dense, "a router is never quantized"
    assert some.expert == all_of_it.expert


FLAGS = {
    "--dtype float32": (2, 2, 2),
    "--dtype float": (2, 2, 2),
    "--dtype float32 --kv-cache-dtype bfloat16": (2, 2, 1),
    "--dtype half": (1, 1, 1),
    "--quantization fp8": (0.5, None, 1),
    "--quantization unquant": (1, 1, 1),
    "--quantization mxfp4": (4.25 / 16, 1, 1),
    "--load-format dummy": (1, 1, 1),
    "--kv-cache-dtype fp8_e4m3": (1, 1, 0.5),
    "--kv-cache-dtype int8": (1, 1, 0.5),
    "--kv-cache-dtype fp4_e2m1": (1, 1, 4.5 / 16),
}
"""What a flag makes of the bytes of an expert, of all else that a step reads (None: less), and of a cached token."""


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_that_change_bytes_are_read(flags, write):
    plain, found = read_weights(write(QWEN)), read_weights(write(QWEN), read_flags(flags.split()))
    expert, dense, cache = FLAGS[flags]
    assert (found.expert, found.cache) == (plain.expert * expert, plain.cache * cache)
    assert found.dense == plain.dense * dense if dense else plain.dense / 2 < found.dense < plain.dense


def test_overrides_of_the_configuration_are_read(write):
    def override(**changes):
        return read_flags(["--json-model-override-args", json.dumps(changes)])

    found = read_weights(write(QWEN), override(num_hidden_layers=12, num_experts_per_tok=4, num_experts=64))
    assert (found.moe_layers, found.model.num_layers, found.model.num_experts, found.model.top_k) == (12, 12, 64, 4)
    assert found.expert == read_weights(write(QWEN)).expert
    nested = override(text_config={"num_experts": 64, "num_experts_per_tok": 2})
    found = read_weights(write(read_shape("Qwen3.5-MoE")), nested)
    assert (found.model.num_experts, found.model.top_k, found.moe_layers) == (64, 2, 40)
    gpt_oss = COMMON | CONFIGS["gpt-oss-120b"]  # its layer_types are 36
    assert read_weights(write(gpt_oss), override(num_hidden_layers=12)).moe_layers == 12


@pytest.mark.parametrize("load_format", ["gguf", "bitsandbytes"])
def test_a_load_format_whose_bytes_are_unknown_is_not_answered(load_format, write, capsys):
    assert say("--model", write(QWEN), "--gpu", "h100", "--load-format", load_format) == 1
    assert f": --load-format {load_format} has bytes that are not counted; must be another\n" in capsys.readouterr().err


CHECKPOINTS = {"qwen3-30b-a3b": 61.06e9, "gpt-oss-120b": 65.25e9, "gpt-oss-20b": 13.76e9}
"""Bytes of the published checkpoints: 30.53 billion weights in bf16; OpenAI's 60.8 and 12.8 GiB."""


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_are_the_published_checkpoints(name, write, tell):
    report = tell("--model", write(COMMON | CONFIGS[name]), "--gpu", "h100")
    weights, memory = report["weights"], report["memory"]
    assert weights["gpu_bytes"] == weights["total_bytes"] == pytest.approx(CHECKPOINTS[name], rel=0.005)
    assert memory["left_bytes"] == pytest.approx(80 * 2**30 - weights["total_bytes"])
    assert memory["cache_tokens"] == int(memory["left_bytes"] / weights["cache_bytes_per_token"])


def test_what_does_not_fit_is_not_served(write, tell, capsys):
    asked = ("--model", write(QWEN), "--gpu", "rtx4090", "--mem-fraction-static", 0.9)
    report = tell(*asked, code=1)
    assert (report["verdict"], report["served"], report["memory"]["fits"]) == ("does not fit", False, False)
    experts, others = 48 * 128 * 9437184, read_weights(write(QWEN)).held
    assert report["memory"]["resident_experts"] == int((0.9 * 24 * 2**30 - others) / (experts / 128)) == 44
    for more in (("--enable-paged-experts", "--paged-experts-num-resident", 200), ("--ep-num-redundant-experts", 16)):
        assert tell(*asked, *more, code=1)["memory"]["resident_experts"] == 44, more
    assert say(*asked) == 1
    assert "44 of 128 experts a layer would fit resident" in capsys.readouterr().out
    report = tell(*asked, "--batch", 16, "--context", 8192, code=1)
    cached = 16 * 8192 * 48 * 2 * 4 * 128 * 2
    assert report["memory"]["resident_experts"] == int((0.9 * 24 * 2**30 - others - cached) / (experts / 128))
    assert report["not_answered"] == ["the time of a step: the weights do not fit"]
    assert "step_ms" not in report["estimate"]["estimates"][0]


@pytest.mark.parametrize("flag", ["--cpu-offload-gb", "--offload-group-size"])
@pytest.mark.parametrize("machine", [("--gpu", "rtx4090"), ("--gpu", "h200"), ("--bandwidth", 3350)])
def test_offloaded_weights_may_fit_and_are_not_timed(flag, machine, write, tell):
    asked = ("--model", write(QWEN), *machine)
    assert tell(*asked, flag, 30)["served"], "they lie elsewhere"
    report = tell(*asked, flag, 30, "--batch", 16, "--active", 40, 20, code=1)
    assert report["not_answered"] == ["the time of a step: offloaded weights come from another memory"]
    for none in (0, -1):
        assert tell(*asked, flag, none, code=int("rtx4090" in machine))["not_answered"] == []


def test_a_step_whose_cache_does_not_fit_is_not_timed(write, tell):
    """The weights leave 90 GB for 98,304 bytes a token."""
    asked = ("--model", write(QWEN), "--gpu", "h200", "--batch", 32, "--active", 40, 20, "--context")
    timed, untimed = tell(*asked, 28_000), tell(*asked, 29_000, code=1)
    assert ["step_ms" in report["estimate"]["estimates"][0] for report in (timed, untimed)] == [True, False]
    (reason,) = untimed["not_answered"]
    assert reason.startswith("the time of a step: --batch 32 with --context 29,000 takes ")


@pytest.mark.parametrize(("slots", "fits"), [(32, True), (120, False)])
def test_slots_of_paged_experts_are_what_a_gpu_holds(slots, fits, write, tell):
    paged = ("--enable-paged-experts", "--paged-experts-num-resident", slots)
    report = tell("--model", write(QWEN), "--gpu", "rtx4090", *paged, code=int(not fits))
    held = read_weights(write(QWEN)).held
    assert report["weights"]["gpu_bytes"] == 48 * slots * 9437184 + held
    assert (report["memory"]["fits"], 40 < report["memory"].get("resident_experts", 41) < 120) == (fits, True)


def test_ranks_divide_the_weights(write, tell):
    weights = tell("--model", write(QWEN), "--gpu", "rtx4090", "--tp", 4)["weights"]
    assert weights["gpu_bytes"] == pytest.approx(weights["total_bytes"] / 4)
    assert weights["cache_bytes_per_token"] == 48 * 2 * 128 * 2, "one of four heads"
    copies = ("--tp", 24, "--ep-size", 24, "--ep-num-redundant-experts", 16)
    assert tell("--model", write(QWEN), "--gpu", "h200", *copies)["served"], "144 experts on 24 ranks"


HELD: Any = SimpleNamespace(num_experts=6)
WEIGHTS = Weights(HELD, 2, expert=8, dense=8, held=24, cache=400, cache_heads=4, bits=None, source="safetensors")


@pytest.mark.parametrize(
    ("ranks", "dp_size", "stages", "cache"),
    [(1, 1, 1, 400), (2, 1, 1, 200), (4, 1, 1, 100), (8, 1, 1, 100), (8, 2, 1, 100), (8, 4, 1, 200), (8, 1, 2, 50)],
)
def test_heads_of_the_cache_are_divided_among_the_ranks_of_a_group_up_to_their_number(ranks, dp_size, stages, cache):
    flags: Any = SimpleNamespace(ranks=ranks, dp_size=dp_size, stages=stages, ep_size=1)
    assert count_cache(WEIGHTS, flags) == cache


@pytest.mark.parametrize(("redundant", "slots", "experts"), [(0, None, 24), (2, None, 32), (2, 5, 20), (2, 9, 32)])
def test_a_rank_holds_redundant_experts_too_or_as_many_as_there_are_slots(redundant, slots, experts):
    """Bytes of a rank of four: two layers of six experts of 8 bytes, and a quarter of all else."""
    flags: Any = SimpleNamespace(ranks=4, dp_size=1, stages=1, ep_size=4, redundant=redundant, slots=slots)
    assert count_held(WEIGHTS, flags) == (experts, 6)
    flags.stages = 2
    assert count_held(WEIGHTS, flags) == (experts / 2, 3)
