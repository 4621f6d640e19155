"""The parts of a model by the names and shapes of its tensors, as checkpoints name them."""

import pytest

from sglang_xshare.check.parts import sort_tensors
from sglang_xshare.check.tensors import Tensor

EXPERTS = 4
BASE = {
    "model.embed_tokens.weight": (100, 8),
    "lm_head.weight": (100, 8),
    "model.layers.0.self_attn.k_proj.weight": (6, 8),
    "model.layers.0.self_attn.v_proj.weight": (6, 8),
    "model.layers.0.mlp.gate.weight": (EXPERTS, 8),
    **{f"model.layers.0.mlp.experts.{expert}.up_proj.weight": (3, 8) for expert in range(EXPERTS)},
}


def sort(shapes, layers=1, **text):
    """Sort tensors of one byte a number."""
    tensors = [Tensor(name, shape) for name, shape in shapes.items()]
    return sort_tensors(tensors, EXPERTS, layers, text, lambda tensor, is_expert: float(tensor.count))


def test_a_small_model_counted_by_hand():
    parts = sort(BASE, num_attention_heads=4, num_key_value_heads=2)
    assert (parts.experts, parts.moe_layers) == (EXPERTS * 3 * 8, 1)
    assert parts.held == 2 * 100 * 8 + 2 * 6 * 8 + EXPERTS * 8
    assert parts.read == parts.held - 100 * 8, "the embedding is looked up"
    assert (parts.cached, parts.cache_heads) == (12, 2)


def test_an_embedding_that_is_the_head_is_read():
    tied = {name: shape for name, shape in BASE.items() if name != "lm_head.weight"}
    assert sort(tied).read == sort(tied).held


def test_layers_and_heads_that_draft_are_left_out():
    more = {f"mtp.layers.0.mlp.experts.{expert}.up_proj.weight": (3, 8) for expert in range(EXPERTS)}
    more |= {"mtp.fc.weight": (8, 16), "model.layers.1.eh_proj.weight": (8, 16)}
    more |= {f"model.layers.1.mlp.experts.{expert}.up_proj.weight": (3, 8) for expert in range(EXPERTS)}
    assert sort(BASE | more) == sort(BASE)
    assert sort(BASE | more, layers=2).moe_layers == 2


def test_encoders_are_held_and_not_read():
    wrapped = {name.replace("model.", "language_model.model."): shape for name, shape in BASE.items()}
    more = {"vision_tower.blocks.0.attn.k_proj.weight": (8, 8), "vision_tower.embeddings.weight": (8, 8)}
    parts, alone = sort(wrapped | more), sort(wrapped)
    assert (parts.read, parts.cached) == (alone.read, alone.cached)
    assert parts.held == alone.held + 2 * 64


WITHOUT_ATTENTION = {name: shape for name, shape in BASE.items() if "self_attn" not in name}
ATTENTION = {
    "latent": ({"self_attn.kv_a_proj_with_mqa.weight": (7, 8)}, (7, 1)),
    "one head": ({"attn.wkv.weight": (7, 8)}, (7, 1)),
    "fused": ({"attention.query_key_value.weight": (16, 8)}, (8, 2)),
    "AWQ": ({"self_attn.k_proj.scales": (1, 6), "self_attn.v_proj.scales": (1, 6)}, (12, 2)),
    "packed": ({"self_attn.k_proj.weight_packed": (6, 1), "self_attn.v_proj.weight_packed": (6, 1)}, (12, 2)),
    "keys are values": ({"self_attn.k_proj.weight": (6, 8)}, (12, 2)),
    "compressor": ({"self_attn.kv_proj.weight": (7, 8), "self_attn.compressor.kv_proj.weight": (9, 8)}, (7, 1)),
}


@pytest.mark.parametrize("case", ATTENTION)
def test_what_attention_caches(case):
    shapes, expected = ATTENTION[case]
    layer = {f"model.layers.0.{name}": shape for name, shape in shapes.items()}
    parts = sort(WITHOUT_ATTENTION | layer, num_attention_heads=4, num_key_value_heads=2)
    assert (parts.cached, parts.cache_heads) == expected


def test_linear_attention_caches_nothing():
    """Kimi Linear projects keys and values too."""
    linear = {f"model.layers.1.self_attn.{name}": (6, 8) for name in ("k_proj.weight", "v_proj.weight", "A_log")}
    assert sort(BASE | linear, layers=2).cached == sort(BASE).cached
    with pytest.raises(ValueError, match="none of the model's tensors projects to keys and values"):
        sort(WITHOUT_ATTENTION | {"model.layers.0.mixer.A_log": (8,)})


def test_stacked_experts_are_known_by_their_number():
    """Granite and Step-3.5 have other names of modules and key heads. A convolution of equal length is no expert."""
    rest = {name: shape for name, shape in BASE.items() if ".experts." not in name}
    stacked = {
        "model.layers.0.moe.up_proj.weight": (EXPERTS, 3, 8),
        "model.layers.0.mamba.conv1d.weight": (EXPERTS, 1, 4),
    }
    parts = sort(rest | stacked, num_attention_heads=4, num_attention_groups=2)
    assert (parts.experts, parts.moe_layers, parts.cache_heads) == (EXPERTS * 3 * 8, 1, 2)
    assert parts.held == sort(BASE).held + EXPERTS * 4


def test_experts_without_weights_are_refused():
    empty = {name: (0, 8) if ".experts." in name else shape for name, shape in BASE.items()}
    with pytest.raises(ValueError, match="the model's experts have no weights"):
        sort(empty)
