"""Weights of every family as transformers' modules have them, against the number that each was published with."""

import pytest
import transformers

from benchmark.common.paths import ROOT
from check.published import FAMILIES, UNKNOWN, read_shape
from served.hub import ON_HUB
from sglang_xshare.check.weights import read_weights


def count(weights):
    """Return the weights of a model in bfloat16."""
    return (weights.moe_layers * weights.model.num_experts * weights.expert + weights.held) / 2


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_the_weights_that_it_was_published_with(name, write):
    """Within 1 %, or within half of the last digit that is published."""
    billions = FAMILIES[name]["billions"]
    published, digits = float(billions), len(billions.partition(".")[2])
    found = count(read_weights(write(read_shape(name)))) / 1e9
    assert abs(found - published) <= max(published * 0.01, 0.5 / 10**digits)


def test_every_family_of_the_page_is_counted_or_named():
    assert {*FAMILIES, *UNKNOWN} - {"Llama 4"} == set(ON_HUB)
    page = (ROOT / "docs" / "check.md").read_text()
    assert f"compares {len(FAMILIES) - 1} families, and Llama 4," in page


def test_layers_and_experts_are_the_module_trees(write):
    """NemotronH: 23 of 52 layers have experts, of two matrices."""
    weights = read_weights(write(read_shape("Nemotron 3")))
    assert (weights.moe_layers, weights.expert) == (23, 2 * 2688 * 1856 * 2)
    assert 2 * count(weights) == pytest.approx(63.2e9, rel=0.005)


CACHED = {
    "Nemotron 3": (6 * 2 * 2 * 128 * 2, 2),  # six of its layers have attention
    "Qwen3-Next": (12 * 2 * 2 * 256 * 2, 2),  # 12 of its 48 layers: linear attention caches no token
    "DeepSeek-V3": (61 * (512 + 64) * 2, 1),  # latent attention is one head
    "Gemma 4": ((25 * 2 * 8 * 256 + 5 * 2 * 2 * 512) * 2, 8),  # keys that are values are cached twice
}
"""Bytes of a token in the KV cache, and the heads that ranks divide."""


@pytest.mark.parametrize("name", CACHED)
def test_what_a_family_caches(name, write):
    weights = read_weights(write(read_shape(name)))
    assert (weights.cache, weights.cache_heads) == CACHED[name]


def test_llama_4_has_experts_in_every_second_layer(write):
    shape = read_shape("Llama 4")
    del shape["text_config"]["moe_layers"]
    shape["text_config"] |= {"interleave_moe_layer_step": 2, "num_local_experts": 128, "intermediate_size_mlp": 16384}
    weights = read_weights(write(shape))
    assert weights.moe_layers == 24
    assert count(weights) == pytest.approx(400e9, rel=0.01), "Maverick"


def test_shared_experts_of_ernie_are_counted(write):
    shape = read_shape("ERNIE 4.5")
    more = read_weights(write(shape | {"moe_num_shared_experts": 3})).dense
    assert more - read_weights(write(shape)).dense == 27 * 3 * 2560 * 1536 * 2


def test_images_are_held_and_not_read_by_a_step(write):
    shape = read_shape("Qwen3.5-MoE")
    weights = read_weights(write(shape))
    deeper = read_weights(write(shape | {"vision_config": shape["vision_config"] | {"depth": 54}}))
    assert deeper.held > weights.held
    assert deeper.dense == weights.dense


@pytest.mark.parametrize("name", ["Step3p5ForCausalLM", "KimiK3LinearForCausalLM", "MiniMaxM3SparseForCausalLM"])
def test_a_model_that_transformers_does_not_have_is_not_guessed(name, write):
    """Not by a model_type either that is another family's, as SGLang's tests give it."""
    shape = {"architectures": [name], "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    with pytest.raises(ValueError, match=f"transformers {transformers.__version__} does not have {name}"):
        read_weights(write(shape | {"num_hidden_layers": 2}))
