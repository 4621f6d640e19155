"""The tiny models by family: what each has of its kind, and what its server takes to run on a CPU."""

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
PLAIN = {"num_experts": EXPERTS, "moe_intermediate_size": 64, "head_dim": 32}
WINDOWED = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": None,  # one for each of the two
}
GRANITE = {
    **{"num_local_experts": EXPERTS, "embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "attention_multiplier": 0.2,
}
FAMILIES = {
    "GLM-4-MoE": named(
        "Glm4Moe",
        {**GROUPED, "head_dim": 32, "use_qk_norm": True, "attention_bias": True},
        {"scoring": "sigmoid", **GROUPS},
    ),
    "Mixtral": named("Mixtral", {"num_local_experts": EXPERTS}),
    "OLMoE": named("Olmoe", {"num_experts": EXPERTS, "num_key_value_heads": 4}, {"renormalize": False}),
    "Qwen2-MoE": named(
        "Qwen2Moe",
        {"num_experts": EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
        {"renormalize": False},
        env=INTERPRETED,  # the shared expert's gate
    ),
    "Granite-MoE": named("GraniteMoe", GRANITE),
    "MiniMax-M2": named(
        "MiniMaxM2",
        {"num_local_experts": EXPERTS, "head_dim": 32, "rope_parameters": {**ROTARY, "partial_rotary_factor": 0.5}},
        {"scoring": "sigmoid"},
        # Upstream's norm of queries and keys is a CUDA kernel, or one of the compiled sgl-kernel.
        {"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 16, "use_qk_norm": False},
    ),
    "DeepSeek-V2": named(
        "DeepseekV2",
        {
            **LATENT,
            "q_lora_rank": None,
            # Transformers leaves the attention of this model unscaled, whatever mscale_all_dim says.
            "rope_parameters": {**YARN, "mscale_all_dim": 0.0},
            "topk_method": "group_limited_greedy",
        },
        {"renormalize": False, **GROUPS},
        {"scoring_func": "softmax", "moe_layer_freq": 1},
        **LATENT_SERVER,
    ),
    "DeepSeek-V3": named(
        "DeepseekV3",
        {**LATENT, "q_lora_rank": 32, "rope_parameters": {**YARN, "mscale_all_dim": 1.0}},
        {"scoring": "sigmoid", **GROUPS},
        {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        **LATENT_SERVER,
    ),
    "ERNIE 4.5": named(
        "Ernie4_5_Moe",
        {
            **{"moe_num_experts": EXPERTS, "moe_k": TOP_K, "moe_num_shared_experts": 1, "moe_intermediate_size": 64},
            **{"moe_layer_start_index": 1, "moe_layer_end_index": 2},
        },
    ),
    "gpt-oss": named(
        "GptOss",  # Its sliding window, 128, is longer than any text here.
        {"num_local_experts": EXPERTS, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
        published={"swiglu_limit": 7.0},
        **LATENT_SERVER,
    ),
    "Qwen3-MoE": named("Qwen3Moe", {**PLAIN, "norm_topk_prob": True}),
    "GLM-4.7-Flash": named(
        "Glm4MoeLite",
        {**LATENT, "q_lora_rank": 32, "n_group": 1, "topk_group": 1},
        {"scoring": "sigmoid"},
        **LATENT_SERVER,
    ),
    "HunYuan v3": named(
        "HYV3", PLAIN, {"scoring": "sigmoid"}, {"first_k_dense_replace": 1, "route_norm": True, "qk_norm": True}
    ),
    "HunYuan v1": named(
        "HunYuanMoEV1",
        {"num_experts": EXPERTS, "head_dim": 32},
        published={
            **{"moe_topk": [TOP_K] * 3, "moe_intermediate_size": 64, "num_shared_expert": [1] * 3},
            "use_mixed_mlp_moe": True,
            # As published it does not run: SGLang's attention takes its normed queries, a row a head, for padded rows.
            "use_qk_norm": False,
        },
    ),
    "Laguna": named(
        "Laguna",
        {
            **PLAIN,
            **WINDOWED,
            **{"shared_expert_intermediate_size": 64, "moe_routed_scaling_factor": 2.5},
            "num_attention_heads_per_layer": [4, 8, 4],
        },
        {"scoring": "sigmoid"},
        {"gating": "per-head"},
    ),
    "EXAONE-MoE": named(
        "ExaoneMoe",
        {
            **PLAIN,
            "sliding_window_pattern": 3,
            "rope_parameters": {**ROTARY, "rope_theta": 1000000.0},  # which SGLang takes, whatever it reads
        },
        {"scoring": "sigmoid"},
        # With a pattern SGLang asks for one of three backends: Triton's, the one that runs here, has no window for it.
        {"is_moe_layer": [False, True, True], "sliding_window_pattern": None},
        names=((r"\.gate\.e_score", ".e_score"),),
    ),
    "Cohere 2 MoE": named(
        "Cohere2Moe",
        {
            **{"num_experts": EXPERTS, "num_shared_experts": 1, "expert_selection_fn": "sigmoid"},
            **{"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 96, "head_dim": 32},
            "tie_word_embeddings": True,
        },
        {"scoring": "sigmoid"},
        {"first_k_dense_replace": 1},
    ),
    "Mellum": named("Mellum", {**PLAIN, **WINDOWED}),
    "Granite-MoE shared": named("GraniteMoeShared", {**GRANITE, "shared_intermediate_size": 64}),
    "Granite 4": named(
        "GraniteMoeHybrid",
        {
            **GRANITE,
            "shared_intermediate_size": 64,
            "layer_types": ["attention"] * 3,  # SGLang's Mamba layers have no convolution on a CPU
            **{"position_embedding_type": "rope", "mamba_n_heads": 8},
        },
    ),
}
ON_OLDER = ("GLM-4-MoE", "Mixtral", "MiniMax-M2")
"""Served on older releases too: groups and a bias, no group and no bias, a bias alone."""
