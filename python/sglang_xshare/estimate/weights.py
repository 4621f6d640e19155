"""The bytes that a decode step of a model reads, from its config.json alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..admission.model import MoeModel, read_folder

BITS = {"fp8": 8.0, "mxfp4": 4.25, "w8a8_int8": 8.0, "w8a8_fp8": 8.0}
"""Bits a weight by `quant_method`, the scales of mxfp4's blocks of 32 included. Those of fp8 are below 0.1 %."""
PLAIN_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0}


@dataclass(frozen=True)
class Weights:
    """A model, its layers with experts, and the bytes that one decode step reads of it.

    `expert`: of one expert in one layer, `bits` a weight. `dense`: of all else, once a step: attention, router, shared
    experts, layers without experts, the head. `cache`: of the KV cache, for one token of one request, all layers.
    """

    model: MoeModel
    moe_layers: int
    expert: float
    dense: float
    cache: float
    bits: float


def read_weights(folder: Path) -> Weights:
    """Read config.json. Raises ValueError, one line, for none, a dense or unknown model, an unknown quantization."""
    model = read_folder(str(folder))
    whole = json.loads((folder / "config.json").read_bytes())
    config = whole.get("text_config", whole)
    quantization = whole.get("quantization_config") or config.get("quantization_config")
    plain = PLAIN_BITS.get(
        config.get("dtype") or config.get("torch_dtype") or whole.get("torch_dtype") or "bfloat16", 16.0
    )
    bits = _read_bits(quantization, folder) if quantization else plain
    linear = (
        plain if quantization and quantization.get("quant_method") == "mxfp4" else bits
    )  # mxfp4 holds experts alone
    try:
        return _count(config, model, bits, linear, plain)
    except KeyError as error:
        raise ValueError(f"--model {folder}: config.json lacks {error}; allowed is a complete one") from None


def _count(config: dict[str, Any], model: MoeModel, bits: float, linear: float, plain: float) -> Weights:
    hidden = config["hidden_size"]
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    moe_layers = _count_moe_layers(config, model.num_layers)
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
    attention, cache = _count_attention(config, hidden)
    weights = model.num_layers * attention
    weights += moe_layers * (3 * hidden * shared + hidden * model.num_experts)
    weights += (model.num_layers - moe_layers) * 3 * hidden * config.get("intermediate_size", 0)
    return Weights(
        model=model,
        moe_layers=moe_layers,
        expert=3 * hidden * width * bits / 8,
        dense=weights * linear / 8 + hidden * config["vocab_size"] * plain / 8,
        cache=model.num_layers * cache * 2,
        bits=bits,
    )


def _count_moe_layers(config: dict[str, Any], layers: int) -> int:
    """As Qwen (`decoder_sparse_step`, `mlp_only_layers`) and DeepSeek (`first_k_dense_replace`) say it."""
    first = config.get("first_k_dense_replace") or 0
    step = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
    step = step if isinstance(step, int) else 1
    dense = set(config.get("mlp_only_layers") or [])
    return sum(layer >= first and (layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def _count_attention(config: dict[str, Any], hidden: int) -> tuple[int, int]:
    """(weights of one layer's attention, numbers it caches for a token)."""
    heads = config["num_attention_heads"]
    if rank := config.get("kv_lora_rank"):  # DeepSeek's latent attention
        nope, rope, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
        q_rank = config.get("q_lora_rank")
        queries = heads * (nope + rope)
        weights = hidden * q_rank + q_rank * queries if q_rank else hidden * queries
        weights += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        return weights, rank + rope
    head_dim = config.get("head_dim") or hidden // heads
    cached = 2 * (config.get("num_key_value_heads") or heads) * head_dim
    return hidden * (2 * heads * head_dim + cached), cached


def _read_bits(quantization: dict[str, Any], folder: Path) -> float:
    """Bits a weight takes, with the scales of its group."""
    method = quantization.get("quant_method")
    if method in BITS:
        return BITS[method]
    if method in ("awq", "gptq"):
        group = quantization.get("group_size") or 128
        width = quantization.get("bits") or 4
        # A scale of 16 bits and a zero point a group; group_size -1 is one a column.
        return width + (16 + width) / group if group > 0 else width
    raise ValueError(
        f"--model {folder}: quant_method {method} is not known; allowed is none, {', '.join(BITS)}, awq, gptq"
    )
