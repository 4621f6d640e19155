"""What SGLang refuses as it builds a model: experts in blocks that its ranks would cut."""

from types import SimpleNamespace

import pytest

from benchmark.gpu.models import COMMON, CONFIGS
from compatibility.configured import pack
from sglang_xshare.check.blocks import explain_cut
from sglang_xshare.compatibility.formats import slice_columns

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
QWEN_235B = COMMON | CONFIGS["qwen3-30b-a3b"] | {"moe_intermediate_size": 1536, "quantization_config": BLOCKS}


def explain(shape, name="fp8", **flags):
    """What is said of a model's shape and resolved flags."""
    text = SimpleNamespace(**shape)
    model = SimpleNamespace(quantization=name, hf_config=text, hf_text_config=text)
    usual = {"device": "cuda", "ep_size": 1, "moe_dp_size": 1, "ep_num_redundant_experts": 0, "moe_a2a_backend": "none"}
    return explain_cut(model, SimpleNamespace(**{"quantization": name, **usual, **flags}))


def test_the_line_names_the_columns_and_both_ways_out():
    assert explain(QWEN_235B, tp_size=8) == (
        "--tp-size 8 with --ep-size 1: a rank would hold 192 of the 1536 columns of an expert, which is no multiple of "
        "the blocks of 128 that its fp8 by block weights are quantized by; use --ep-size 8 or --tp 4"
    )


@pytest.mark.parametrize("ranks", range(1, 17))
@pytest.mark.parametrize("width", [512, 768, 1408, 1536, 2048])
def test_it_is_refused_when_a_rank_has_no_whole_blocks(width, ranks):
    """Which is what upstream's create_weights checks: `intermediate_size_per_partition % block_n`."""
    whole = width % ranks == 0 and (width // ranks) % 128 == 0
    assert (explain(QWEN_235B | {"moe_intermediate_size": width}, tp_size=ranks) is None) == whole
    assert (slice_columns(width, ranks, 128) is not None) == whole


def test_what_divides_is_served(monkeypatch):
    for flags in (
        {"ep_size": 8},
        {"ep_size": 4},  # two ranks an expert
        {"tp_size": 4},
        {"device": "cpu"},  # which pads
        {"moe_dp_size": 2},
    ):
        assert explain(QWEN_235B, **{"tp_size": 8, **flags}) is None, flags
    for unchecked in ({"quant_method": "fp8"}, {"quant_method": "awq", "group_size": 128}, {}):
        shape = QWEN_235B | {"quantization_config": unchecked}
        assert explain(shape, unchecked.get("quant_method"), tp_size=8) is None, unchecked
    monkeypatch.setenv("SGLANG_USE_AITER", "1")  # which pads too
    assert explain(QWEN_235B, tp_size=8) is None


def test_other_formats_that_upstream_checks_are_refused():
    compressed = pack(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    for declared in (compressed, BLOCKS | {"quant_method": "blockwise_int8"}):
        shape = QWEN_235B | {"quantization_config": declared}
        assert "192 of the 1536 columns" in explain(shape, declared["quant_method"], tp_size=8)


def test_what_it_suggests_is_served():
    """Experts that 8 ranks do not divide, and a shared expert that whole experts leave cut."""
    odd = QWEN_235B | {"num_experts": 100}
    assert explain(odd, tp_size=8).endswith("; use --tp 4")
    assert explain(odd, tp_size=8, ep_num_redundant_experts=4).endswith("; use --ep-size 8 or --tp 4")
    shared = QWEN_235B | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    assert explain(shared, tp_size=8).endswith("; use --tp 4")
    assert "64 of the 512 columns of the shared expert" in explain(shared, tp_size=8, ep_size=8)
    assert explain(shared, tp_size=8, ep_size=8, moe_a2a_backend="deepep") is None, "held whole"
    assert explain(shared, tp_size=4) is None
    counted = QWEN_235B | {"moe_intermediate_size": 512, "n_shared_experts": 1}
    assert "64 of the 512 columns of the shared expert" in explain(counted, tp_size=8, ep_size=8)
    assert explain(counted | {"n_shared_experts": 2}, tp_size=8, ep_size=8) is None, "1024 columns"
