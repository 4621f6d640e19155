"""Published `config.json`s of the families in docs/limits.md that differ from what transformers has by default."""

from typing import Any

from benchmark.gpu.models import CONFIGS

LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK = {
    **{"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61},
    "q_lora_rank": 1536,
    **LATENT,
    **{"n_shared_experts": 1, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "model_type": "deepseek_v3"},
    "architectures": ["DeepseekV3ForCausalLM"],
}
GRANITE = {"embedding_multiplier": 12.0, "tie_word_embeddings": True, "hidden_act": "silu"}
NEMOTRON = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"

SHAPES: dict[str, dict[str, Any]] = {
    "DeepSeek-V3": DEEPSEEK
    | {
        **{"num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256},
        **{"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "vocab_size": 129280},
        "num_nextn_predict_layers": 1,
    },
    "Kimi K2.5": {
        **{"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"},
        "text_config": DEEPSEEK
        | {
            **{"model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384},
            **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "vocab_size": 163840},
        },
    },
    "DeepSeek-V2": {
        **{"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048},
        **{"intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None},
        **LATENT,
        **{"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1},
        "vocab_size": 102400,
    },
    "Qwen3-MoE": CONFIGS["qwen3-30b-a3b"],
    "gpt-oss": {key: value for key, value in CONFIGS["gpt-oss-120b"].items() if key != "quantization_config"},
    "OLMoE": {
        **{"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 2048},
        **{"intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16},
        **{"num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50304},
    },
    "GLM-4-MoE": {
        **{"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True},
        **{"use_qk_norm": True, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536},
        **{"num_hidden_layers": 92, "first_k_dense_replace": 3, "num_attention_heads": 96, "num_key_value_heads": 8},
        **{"head_dim": 128, "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8},
        **{"vocab_size": 151552, "num_nextn_predict_layers": 1},
    },
    "EXAONE-MoE": {
        **{"architectures": ["ExaoneMoEForCausalLM"], "model_type": "exaone_moe", "hidden_size": 6144},
        **{"intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 48},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 128},
        **{"num_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1},
        **{"is_moe_layer": [False] + [True] * 47, "vocab_size": 153600},
    },
    "HunYuan v1": {
        **{"architectures": ["HunYuanMoEV1ForCausalLM"], "model_type": "hunyuan_v1_moe", "hidden_size": 4096},
        **{"intermediate_size": 3072, "moe_intermediate_size": [3072] * 32, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "attention_head_dim": 128, "num_experts": 64},
        **{"moe_topk": [8] * 32, "num_shared_expert": [1] * 32, "use_qk_norm": True, "vocab_size": 128167},
        "tie_word_embeddings": True,
    },
    "Granite-MoE": GRANITE
    | {
        **{"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "hidden_size": 1536},
        **{"intermediate_size": 512, "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8},
        **{"num_local_experts": 40, "num_experts_per_tok": 8, "vocab_size": 49155},
    },
    "Granite 4": GRANITE
    | {
        **{"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 4096},
        **{"intermediate_size": 768, "shared_intermediate_size": 1536, "num_hidden_layers": 40},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10},
        "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
        **{"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_expand": 2},
        **{"position_embedding_type": "nope", "vocab_size": 100352},
    },
    "Nemotron 3": {
        **{"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 2688},
        **{"intermediate_size": 1856, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712},
        **{"num_hidden_layers": 52, "hybrid_override_pattern": NEMOTRON, "num_attention_heads": 32},
        **{"num_key_value_heads": 2, "head_dim": 128, "n_routed_experts": 128, "n_shared_experts": 1},
        **{"num_experts_per_tok": 6, "mlp_hidden_act": "relu2", "mamba_num_heads": 64, "mamba_head_dim": 64},
        **{"ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128, "expand": 2},
        "vocab_size": 131072,
    },
    "Cohere 2 MoE": {
        **{"architectures": ["Cohere2MoeForCausalLM"], "model_type": "cohere2_moe", "hidden_size": 2048},
        **{"intermediate_size": 768, "prefix_dense_intermediate_size": 3072, "first_k_dense_replace": 1},
        **{"num_hidden_layers": 49, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
        **{"num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 0, "vocab_size": 262144},
        "tie_word_embeddings": True,
    },
    "Gemma 4": {
        **{"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_size": 2816},
        **{"intermediate_size": 2112, "moe_intermediate_size": 704, "num_hidden_layers": 30},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2, "head_dim": 256},
        **{"global_head_dim": 512, "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 128},
        **{"top_k_experts": 8, "hidden_size_per_layer_input": 0},
        **{"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5, "vocab_size": 262144},
        "tie_word_embeddings": True,
    },
    "MiniMax-M3": {
        **{"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl"},
        "text_config": {
            **{"num_hidden_layers": 60, "num_local_experts": 128, "num_experts_per_tok": 4},
            **{"moe_layer_freq": [0] * 3 + [1] * 57, "vocab_size": 200064},
        },
        "vision_config": {},
    },
}
