"""Tiny models of which transformers has none: configurations alone, and a SGLang plugin that draws their weights."""

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch

from served.family import EXPERTS, INTERPRETED, LATENT_SERVER, TOP_K
from served.hybrids import GATED_DELTA_NET, NO_SNAPSHOTS, STATES
from sglang_xshare import Router

FLAGS = ("--load-format", "dummy")
SIZE = 128
VOCABULARY = 1024
LAYERS = 3


@dataclass(frozen=True)
class Recent:
    """One architecture, as small as it can be."""

    config: Mapping[str, Any]
    """Its config.json."""
    layers: tuple[int, ...]
    """Those with experts."""
    bias: str | None = None
    """The name of its correction bias in a layer of SGLang's model."""
    router: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of its `Router` but top-k and bias."""
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def read_router(self, layer: int) -> Router:
        """That of a layer."""
        bias = None if self.bias is None else draw(f"model.layers.{layer}.{self.bias}", (EXPERTS,))
        return Router(TOP_K, correction_bias=bias, **self.router)


COMMON = {
    **{"vocab_size": VOCABULARY, "hidden_size": SIZE, "intermediate_size": 64, "moe_intermediate_size": 64},
    **{"num_hidden_layers": LAYERS, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "eos_token_id": 0},
    "tie_word_embeddings": False,
}
RECENT = {
    "Step-3.5": Recent(
        {
            **COMMON,
            **{"architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "num_attention_heads": 4},
            **{"num_attention_groups": 2, "head_dim": 32, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K},
            **{"moe_layers_enum": "1,2", "moe_router_scaling_factor": 3.0, "moe_router_activation": "sigmoid"},
            **{"use_moe_router_bias": True, "need_fp32_gate": True, "norm_expert_weight": True},
            **{"share_expert_dims": 64, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            "sliding_window": 128,
            "attention_other_setting": {
                **{"attention_type": "sliding_attention", "num_attention_heads": 4, "num_attention_groups": 2},
                "head_dim": 32,
            },
            **{"use_head_wise_attn_gate": True, "rope_theta": [10000.0] * LAYERS, "rope_scaling": None},
            **{"yarn_only_types": ["full_attention"], "partial_rotary_factors": [0.5, 1.0, 0.5]},
            **{"swiglu_limits": [0.0] * LAYERS, "swiglu_limits_shared": [0.0] * LAYERS},
        },
        (1, 2),
        "moe.router_bias",
        {"scoring": "sigmoid"},
        **LATENT_SERVER,
    ),
    "Qwen3.8-Flash-Next": Recent(
        {
            **{"architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp"},
            "language_model_only": True,
            "text_config": {
                **COMMON,
                **GATED_DELTA_NET,
                **{"model_type": "qwen4_exp_text", "num_attention_heads": 4, "num_key_value_heads": 2},
                **{"num_experts_per_tok": TOP_K, "norm_topk_prob": True},
                **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "hc_count": 2},
                "hc_lowrank": 32,
                "ple_layer_ids": [2],  # the second layer
                **{"ple_embed_dim": SIZE, "heads_per_ngram": 2, "ngram_vocab_size_base": 512},
            },
            "vision_config": {"depth": 1, "hidden_size": 32, "num_heads": 2},
        },
        (0, 1, 2),
        flags=NO_SNAPSHOTS,
        env={**INTERPRETED, **STATES, "TORCHDYNAMO_DISABLE": "1"},  # it compiles what mixes its residual streams
    ),
}


def lend() -> None:
    """Called by upstream's `load_plugins()` in every process: what the weights are that --load-format dummy draws."""
    if multiprocessing.parent_process() is None:
        return
    from sglang.srt.model_loader import loader

    loader.initialize_dummy_weights = draw_weights


def draw_weights(model: torch.nn.Module) -> None:
    """All in float32: parts of Qwen4-Exp are in bf16, whatever the model's type."""
    for module in model.float().modules():
        for name in ("params_dtype", "output_dtype"):
            if getattr(module, name, None) == torch.bfloat16:
                setattr(module, name, torch.float32)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and "rotary" not in name:
            tensor.copy_(draw(name, tuple(tensor.shape)))


def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A parameter by its name, as `families.draw_weights` has it."""
    mean, spread = (1.0, 0.1) if "norm" in name else (0.0, 0.1)
    if "embed" in name:
        spread = 1.0
    elif len(shape) > 1:
        spread = shape[-1] ** -0.5 * (2.0 if ".gate." in name else 1.0)
    return torch.empty(shape).normal_(mean, spread, generator=torch.Generator().manual_seed(crc32(name.encode())))
