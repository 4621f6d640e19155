"""Small configurations of some families and of drafts, to be served with `--load-format dummy`."""

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    **{"dtype": "bfloat16", "vocab_size": 4096, "max_position_embeddings": 2048, "tie_word_embeddings": False},
    **{"bos_token_id": None, "eos_token_id": 0, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-moe": {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256},
        **{"intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 64, "num_experts": 128, "num_experts_per_tok": 8},
        **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_theta": 1000000.0},
    },
    "gpt-oss": {
        **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True},
        **{"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8},
        **{"num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 128, "swiglu_limit": 7.0},
        **{"initial_context_length": 1024, "rope_theta": 150000},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0},
            **{"original_max_position_embeddings": 1024, "truncate": False},
        },
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
            ],
        },
    },
    "deepseek-v3": {
        **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 256},
        **{"intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 3, "first_k_dense_replace": 1},
        **{"moe_layer_freq": 1, "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 128},
        **{"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128},
        **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4},
        **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        "rope_theta": 10000.0,
    },
    "glm-4-moe": {
        **{"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True},
        **{"use_qk_norm": True, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128},
        **{"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 64, "partial_rotary_factor": 0.5, "n_routed_experts": 160, "n_shared_experts": 1},
        **{"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
        **{"routed_scaling_factor": 2.5, "rope_theta": 1000000.0},
    },
    # A draft of the first: one dense layer on three of its hidden states.
    "qwen3-moe-eagle3": {
        **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "attention_bias": False},
        **{"mlp_bias": False, "draft_vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512},
        **{"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
        "rope_theta": 1000000.0,
    },
    # Drafts of blocks: two dense layers on the hidden states of two of its layers.
    "qwen3-moe-dflash": {
        **{"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "attention_bias": False, "hidden_size": 256},
        **{"intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 64, "rope_theta": 1000000.0, "block_size": 4, "num_target_layers": 3},
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 1]},
    },
    # Families that SGLang serves on a GPU alone.
    "minimax-m3": {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "model_type": "mixtral",  # as SGLang reads the published model's `text_config`, which names none
        **{"hidden_act": "swigluoai", "hidden_size": 256, "intermediate_size": 128, "dense_intermediate_size": 512},
        **{"shared_intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8},
        **{"num_key_value_heads": 2, "head_dim": 128, "use_gemma_norm": True, "use_qk_norm": True},
        **{"qk_norm_type": "per_head", "rope_theta": 5000000.0, "rotary_dim": 64, "partial_rotary_factor": 0.5},
        **{"num_local_experts": 128, "num_experts_per_tok": 4, "n_shared_experts": 1, "scoring_func": "sigmoid"},
        **{"use_routing_bias": True, "routed_scaling_factor": 2.0, "moe_layer_freq": [0, 1, 1], "swiglu_alpha": 1.702},
        **{"swiglu_beta": 1.0, "swiglu_limit": 7.0},
        "sparse_attention_config": {
            **{"use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 2},
            **{"sparse_topk_blocks": 16, "sparse_block_size": 128, "sparse_disable_index_value": [0, 1, 1]},
            **{"sparse_score_type": "max", "sparse_init_block": 0, "sparse_local_block": 1},
            "sparse_attention_freq": [0, 1, 1],
        },
    },
    "deepseek-v4": {
        **{"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 256},
        **{"moe_intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 1},
        **{"head_dim": 512, "q_lora_rank": 128, "qk_rope_head_dim": 64, "o_lora_rank": 128, "o_groups": 8},
        **{"sliding_window": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6},
        **{"num_hash_layers": 1, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True},
        **{"routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20},
        **{"compress_ratios": [0, 0, 4, 128, 0], "compress_rope_theta": 160000, "index_n_heads": 64},
        **{"index_head_dim": 128, "index_topk": 512, "rope_theta": 10000},
        "rope_scaling": {
            **{"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1},
            "original_max_position_embeddings": 65536,
        },
        **{"num_nextn_predict_layers": 1, "expert_dtype": "fp4"},
        "quantization_config": {
            **{"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0"},
            "weight_block_size": [128, 128],
        },
    },
    "kimi-k3": {
        **{"architectures": ["KimiK3LinearForCausalLM"], "model_type": "kimi_linear", "hidden_act": "situ"},
        **{"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "attn_res_block_size": 12},
        **{"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128},
        **{"routed_expert_hidden_size": 128, "latent_moe_use_norm": True, "num_hidden_layers": 4},
        **{"first_k_dense_replace": 1, "moe_layer_freq": 1, "num_attention_heads": 4, "num_key_value_heads": 4},
        **{"q_lora_rank": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "mla_use_nope": True, "mla_use_output_gate": True, "num_experts": 896},
        **{"num_experts_per_token": 16, "num_shared_experts": 2, "moe_renormalize": True},
        **{"moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc", "use_grouped_topk": True},
        **{"num_expert_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 0},
        "linear_attn_config": {
            **{"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 128},
            **{"short_conv_kernel_size": 4, "gate_lower_bound": -5.0, "use_full_rank_gate": True},
        },
        "quantization_config": {
            **{"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    **{"format": "mxfp4-pack-quantized", "targets": ["Linear"]},
                    "weights": {
                        **{"dynamic": False, "group_size": 32, "num_bits": 4, "observer": "minmax"},
                        **{"scale_dtype": "torch.uint8", "strategy": "group", "symmetric": True, "type": "float"},
                    },
                },
            },
            "ignore": [
                *("re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"),
                "re:.*lm_head.*",
            ],
        },
    },
}
HERE_ALONE = {"deepseek-v4": "DeepSeek-V4", "minimax-m3": "MiniMax-M3", "kimi-k3": "Kimi K3"}
"""Families that no CPU runs, as the lists of what was executed name them."""

CONFIGS["qwen3-moe-dspark"] = CONFIGS["qwen3-moe-dflash"] | {
    **{"architectures": ["Qwen3DSparkModel"], "block_size": 3, "markov_rank": 16, "markov_head_type": "vanilla"},
}
CONFIGS["qwen3-moe-small"] = CONFIGS["qwen3-moe"] | {
    **{"num_hidden_layers": 2, "num_experts": 16, "num_experts_per_tok": 4}
}
"""Whose selections the PTX's interpreter takes seconds for."""
CONFIGS["qwen3-moe-small-dflash"] = CONFIGS["qwen3-moe-dflash"] | {
    "num_target_layers": 2,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0]},
}


def write_model(name: str, folder: Path) -> Path:
    """Write a model's config.json. Returns its folder."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(COMMON | CONFIGS[name], indent=1))
    return place
