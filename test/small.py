"""Mixtures of experts small enough to be made in a test."""

from typing import Any

from transformers import Qwen3MoeConfig


def small_qwen3(**changes: Any) -> Qwen3MoeConfig:
    """Two layers of 8 experts, top-2."""
    sizes: dict[str, Any] = {
        **{"vocab_size": 300, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
        **{"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    }
    return Qwen3MoeConfig(**sizes | changes)
