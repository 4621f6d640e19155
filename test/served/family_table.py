"""The tiny models by family: what each has of its kind, and what its server takes to run on a CPU."""

from served.family import (
    EXPERTS,
    GRANITE,
    GROUPED,
    GROUPS,
    INTERPRETED,
    LATENT,
    LATENT_SERVER,
    ROTARY,
    TOP_K,
    YARN,
    named,
)

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
    "Qwen3-MoE": named(
        "Qwen3Moe",
        {"num_experts": EXPERTS, "moe_intermediate_size": 64, "head_dim": 32, "norm_topk_prob": True},
    ),
    "GLM-4.7-Flash": named(
        "Glm4MoeLite",
        {**LATENT, "q_lora_rank": 32, "n_group": 1, "topk_group": 1},
        {"scoring": "sigmoid"},
        **LATENT_SERVER,
    ),
    "HunYuan v3": named(
        "HYV3",
        {"num_experts": EXPERTS, "moe_intermediate_size": 64, "head_dim": 32},
        {"scoring": "sigmoid"},
        {"first_k_dense_replace": 1, "route_norm": True, "qk_norm": True},
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
            **{"num_experts": EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
            **{"moe_routed_scaling_factor": 2.5, "head_dim": 32, "num_attention_heads_per_layer": [4, 8, 4]},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": None,  # one for each of the two
        },
        {"scoring": "sigmoid"},
        {"gating": "per-head"},
    ),
    "EXAONE-MoE": named(
        "ExaoneMoe",
        {
            **{"num_experts": EXPERTS, "moe_intermediate_size": 64, "head_dim": 32, "sliding_window_pattern": 3},
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
    "Mellum": named(
        "Mellum",
        {
            **{"num_experts": EXPERTS, "moe_intermediate_size": 64, "head_dim": 32},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": None,  # one for each of the two
        },
    ),
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
