"""What a tiny model of a family is made of, and the parts that several families share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EXPERTS, TOP_K = 32, 4
GROUPS = {"num_expert_group": 4, "topk_group": 2}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
SHAPE: dict[str, Any] = {
    **{"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": TOP_K},
    **{"max_position_embeddings": 512, "rope_parameters": ROTARY, "tie_word_embeddings": False, "bos_token_id": None},
    **{"eos_token_id": 0, "pad_token_id": None},
}
"""What all have, by transformers' names."""


@dataclass(frozen=True)
class Family:
    """One architecture, as small as it can be."""

    config: str
    """Transformers' class of its configuration."""
    architecture: str
    """SGLang's class of the model."""
    shape: Mapping[str, Any]
    router: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of its `Router` but top-k and bias, as its model computes, whatever its configuration says."""
    published: Mapping[str, Any] = field(default_factory=dict)
    """What only a published config.json says, where transformers writes none of it and SGLang reads it."""
    names: tuple[tuple[str, str], ...] = ()
    """Regular expressions for tensors' names as transformers writes them, and what stands there as published."""
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


INTERPRETED = {"TRITON_INTERPRET": "1"}
"""For what upstream computes by a Triton kernel even on a CPU, where that has no AMX."""
TRITON_ATTENTION = ("--attention-backend", "triton", "--triton-attention-num-kv-splits", "1")
"""Of SGLang's attention backends that run here, the only one for attention sinks and for latent attention."""

LATENT_SERVER: dict[str, Any] = {"flags": TRITON_ATTENTION, "env": INTERPRETED}


def named(name: str, *parts: Any, **more: Any) -> Family:
    """Return a family whose two classes have the same beginning; the others are `Family`'s."""
    return Family(f"{name}Config", f"{name}ForCausalLM", *parts, **more)


GROUPED = {
    **{"n_routed_experts": EXPERTS, "n_shared_experts": 1, "moe_intermediate_size": 64, "n_group": 4, "topk_group": 2},
    **{"routed_scaling_factor": 2.5, "first_k_dense_replace": 1},
}
"""The experts of DeepSeek's models and of those that follow them."""
YARN = {
    **ROTARY,
    **{"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "beta_fast": 32, "beta_slow": 1},
    "mscale": 1.0,
}
LATENT = {
    **GROUPED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 256,  # with the next, a width that upstream's Triton attention knows
    **{"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
}
GRANITE = {
    **{"num_local_experts": EXPERTS, "embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "attention_multiplier": 0.2,
}
