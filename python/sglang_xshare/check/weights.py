"""The bytes that a decode step of a model reads, from its config.json alone, and what of a GPU's memory they leave."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..compatibility.moe_model import MoeModel, read_folder
from ..gpus import Gpu
from ..parser import LARGEST
from .server import ServerFlags

BITS = {"fp8": 8.0, "mxfp4": 4.25, "w8a8_int8": 8.0, "w8a8_fp8": 8.0}
"""Bits a weight by `quant_method`, the scales of mxfp4's blocks of 32 included. Those of fp8 are below 0.1 %."""
PLAIN_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0}
EXPERTS_INTERMEDIATE = {
    "Cohere2MoeForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
    "MiniMaxM2ForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "PhiMoEForCausalLM",
}
"""Architectures whose `intermediate_size` is an expert's width; of others it is a dense layer's, up to 8 times that."""


@dataclass(frozen=True)
class Weights:
    """A model, its layers with experts, and its bytes.

    `expert`: of one expert in one layer, `bits` a weight. `dense`: of all else that one decode step reads: attention,
    router, shared experts, layers without experts, the head. `held`: the same and the embedding, which a GPU holds.
    `cache`: of the KV cache, for one token of one request, all layers, which as many as `cache_heads` ranks divide.
    """

    model: MoeModel
    moe_layers: int
    expert: float
    dense: float
    held: float
    cache: float
    cache_heads: int
    bits: float


def read_weights(folder: Path) -> Weights:
    """Read config.json. Raises ValueError in one line where it has none of these bytes, though the model may be served:
    of a dense model, an unknown quantization, a number that is missing or wrong.
    """
    model, whole, text = read_folder(str(folder))
    names = getattr(text, "dtype", None) or getattr(text, "torch_dtype", None) or getattr(whole, "torch_dtype", None)
    plain = PLAIN_BITS.get(names or "bfloat16", 16.0)
    quantization = getattr(whole, "quantization_config", None) or getattr(text, "quantization_config", None)
    bits = _read_bits(quantization) if quantization is not None and vars(quantization) else plain
    linear = plain if getattr(quantization, "quant_method", None) == "mxfp4" else bits  # which is of experts alone
    method = getattr(quantization, "routed_experts_quant_method", None)
    if method == "mxfp4" or getattr(text, "expert_dtype", None) == "fp4":  # as DeepSeek-V4, whose fp8 is of all else
        bits = BITS["mxfp4"]
    tied = getattr(text, "tie_word_embeddings", getattr(whole, "tie_word_embeddings", False))
    number = partial(_read_number, text)
    hidden, dense_width = number("hidden_size"), number("intermediate_size", 0)
    expert_key = "intermediate_size" if model.architecture in EXPERTS_INTERMEDIATE else "moe_intermediate_size"
    width = number("moe_intermediate_size", 0) or number(expert_key)
    moe_layers = _count_moe_layers(text, model.num_layers)
    shared = number("shared_expert_intermediate_size", 0) or number("n_shared_experts", 0) * width
    attention, cache, cache_heads = _count_attention(text, hidden)
    weights = model.num_layers * attention
    weights += moe_layers * (3 * hidden * shared + hidden * model.num_experts)
    weights += (model.num_layers - moe_layers) * 3 * hidden * dense_width
    head = hidden * number("vocab_size") * plain / 8
    dense = weights * linear / 8 + head
    return Weights(
        model=model,
        moe_layers=moe_layers,
        expert=3 * hidden * width * bits / 8,
        dense=dense,
        held=dense if tied else dense + head,
        cache=model.num_layers * cache * 2,
        cache_heads=cache_heads,
        bits=bits,
    )


def _read_number(text: Any, name: str, default: int | None = None) -> int:
    """Without a default it must be there. Numbers listed by layer, all the same, are that one."""
    value, low = getattr(text, name, None), 1 if default is None else 0
    if isinstance(value, list) and value and value.count(value[0]) == len(value):
        value = value[0]
    if value is None:
        value = default
    if type(value) is not int or not low <= value <= LARGEST:
        allowed = f"allowed is an integer of {low} to {LARGEST:,}"
        raise ValueError(f"config.json: {name} {json.dumps(value, default=str)}: {allowed}")
    return value


def _count_moe_layers(text: Any, layers: int) -> int:
    """As Qwen (`decoder_sparse_step`, `mlp_only_layers`) and DeepSeek (`first_k_dense_replace`) say it."""
    first = _read_number(text, "first_k_dense_replace", 0)
    step = getattr(text, "decoder_sparse_step", None) or getattr(text, "moe_layer_freq", None)
    step = step if isinstance(step, int) and step else 1
    dense = set(getattr(text, "mlp_only_layers", None) or [])
    return sum(layer >= first and (layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def _count_attention(text: Any, hidden: int) -> tuple[int, int, int]:
    """(weights of one layer's attention, numbers it caches for a token, heads of the cache)."""
    number = partial(_read_number, text)
    heads = number("num_attention_heads")
    if rank := number("kv_lora_rank", 0):  # DeepSeek's latent attention
        nope, rope, value = (number(f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v"))
        q_rank = number("q_lora_rank", 0)
        queries = heads * (nope + rope)
        weights = hidden * q_rank + q_rank * queries if q_rank else hidden * queries
        weights += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        return weights, rank + rope, 1
    head_dim = number("head_dim", 0) or hidden // heads
    if rank := number("o_lora_rank", 0):  # DeepSeek-V4's, one head of keys that are values; compressed, it caches less
        q_rank, queries = number("q_lora_rank"), heads * head_dim
        weights = hidden * (q_rank + head_dim + number("o_groups") * rank) + (q_rank + rank) * queries
        return weights, head_dim, 1
    cache_heads = number("num_key_value_heads", 0) or heads
    cached = 2 * cache_heads * head_dim
    return hidden * (2 * heads * head_dim + cached), cached, cache_heads


def _read_bits(quantization: Any) -> float:
    """Bits a weight takes, with the scales of its group."""
    method = getattr(quantization, "quant_method", None)
    if method in BITS:
        return BITS[method]
    if method in ("awq", "gptq"):
        group = getattr(quantization, "group_size", None) or 128
        width = getattr(quantization, "bits", None) or 4
        # A scale of 16 bits and a zero point a group; group_size -1 is one a column.
        return width + (16 + width) / group if group > 0 else width
    raise ValueError(f"config.json: quant_method {method or 'missing'}: allowed is none, {', '.join(BITS)}, awq, gptq")


def describe_weights(weights: Weights, flags: ServerFlags) -> dict[str, Any]:
    """Bytes of the model, and of what one GPU holds of it."""
    experts = weights.moe_layers * weights.model.num_experts * weights.expert
    return {
        "moe_layers": weights.moe_layers,
        "experts": weights.model.num_experts,
        "bits_per_expert_weight": weights.bits,
        "expert_bytes": weights.expert,
        "all_experts_bytes": experts,
        "step_bytes": weights.dense,
        "other_bytes": weights.held,
        "total_bytes": experts + weights.held,
        "gpu_bytes": sum(count_held(weights, flags)),
        "cache_bytes_per_token": count_cache(weights, flags),
    }


def count_held(weights: Weights, flags: ServerFlags) -> tuple[float, float]:
    """(bytes of experts, bytes of all else) that one GPU holds: experts, as many as there are slots where they are
    paged, are divided among the ranks, all else among those of one data-parallel group, both among the stages of a
    pipeline.
    """
    held = min(flags.slots or LARGEST, weights.model.num_experts + flags.redundant)
    experts = weights.moe_layers * held * weights.expert
    shared = flags.ranks // flags.dp_size
    return experts / (flags.ranks * flags.stages), weights.held / (shared * flags.stages)


def count_cache(weights: Weights, flags: ServerFlags) -> float:
    """Bytes of KV cache that one GPU holds for one token of one of its requests."""
    return divide(weights, flags).cache / flags.stages


def divide(weights: Weights, flags: ServerFlags) -> Weights:
    """What one rank reads of them in a step through all stages: its slice of an expert, and its share of all else.
    Heads of the KV cache are divided among the ranks of a data-parallel group as far as there are any.
    """
    shared = flags.ranks // flags.dp_size
    return replace(
        weights,
        expert=weights.expert * flags.ep_size / flags.ranks,
        dense=weights.dense / shared,
        cache=weights.cache / min(shared, weights.cache_heads),
    )


def describe_memory(weights: Weights, flags: ServerFlags, gpu: Gpu, cached: int) -> dict[str, Any]:
    """What the weights leave of each GPU, and where they do not fit, how many experts a layer would beside `cached`
    tokens of KV cache. Bytes. All of the memory is counted where nobody says which share weights and KV cache get.
    """
    usable = gpu.memory_bytes * (flags.fraction or 1)
    experts, others = count_held(weights, flags)
    left = usable - experts - others
    report: dict[str, Any] = {
        "gpu_bytes": gpu.memory_bytes,
        "fraction": flags.fraction,
        "left_bytes": max(left, 0.0),
        "cache_tokens": int(max(left, 0.0) / count_cache(weights, flags)),
        "fits": left > 0,
    }
    if left <= 0:
        beside = usable - others - cached * count_cache(weights, flags)
        report["resident_experts"] = max(0, int((flags.slots or weights.model.num_experts) * beside / experts))
    return report
