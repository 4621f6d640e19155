"""The bytes that a decode step of a model reads, from its config.json alone, and what of a GPU's memory they leave."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..compatibility.moe_model import MoeModel, WrongNumber, read_configs, read_folder
from ..gpus import Gpu
from ..parser import LARGEST
from ..refusal import ExpertPolicyError
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
OTHER_WIDTHS = ("expert_ffn_hidden_size", "ffn_hidden_size", "ffn_config")
"""Where other architectures have it, of which the bytes are not counted."""


class Uncounted(ValueError):
    """A configuration that may be served, and whose bytes are not known: a dense model, an unknown quantization, a key
    that is missing."""


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
    """Read config.json. Raises ValueError for none and for a wrong value; `Uncounted` for what has unknown bytes."""
    whole, text = read_configs(str(folder))
    try:
        model = read_folder(str(folder))
    except WrongNumber:
        raise
    except ExpertPolicyError as error:
        raise Uncounted(str(error)) from None
    quantization = whole.get("quantization_config") or text.get("quantization_config")
    plain = PLAIN_BITS.get(text.get("dtype") or text.get("torch_dtype") or whole.get("torch_dtype") or "bfloat16", 16.0)
    bits = _read_bits(quantization, folder) if quantization else plain
    experts_alone = quantization and quantization.get("quant_method") == "mxfp4"
    tied = text.get("tie_word_embeddings", whole.get("tie_word_embeddings", False))
    return _count(Numbers(text, folder), model, bits, plain if experts_alone else bits, plain, bool(tied))


class Incomplete(Uncounted):
    """A configuration without the width of an expert, of which most servers cannot be made."""


class Numbers:
    """The integers of a model's configuration, each looked at before it is used."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self.config, self.folder = config, folder

    def need(self, name: str) -> int:
        """Raises `Uncounted` where it is missing, ValueError where it is no integer of at least 1."""
        found = self.find(name)
        if found is None:
            reason = f"{name} is missing; allowed is an integer of at least 1"
            raise Uncounted(f"--model {self.folder}: config.json: {reason}")
        return found

    def find(self, name: str, low: int = 1) -> int | None:
        """None where it is missing. Raises ValueError as above. Numbers listed by layer, all the same, are that one."""
        value = self.config.get(name)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if value is not None and (type(value) is not int or not low <= value <= LARGEST):
            allowed = f"allowed is an integer of {low} to {LARGEST:,}"
            raise ValueError(f"--model {self.folder}: config.json: {name} {json.dumps(value)}: {allowed}")
        return value


def _count(numbers: Numbers, model: MoeModel, bits: float, linear: float, plain: float, tied: bool) -> Weights:
    hidden, dense_width = numbers.need("hidden_size"), numbers.find("intermediate_size", 0) or 0
    expert_key = "intermediate_size" if model.architecture in EXPERTS_INTERMEDIATE else "moe_intermediate_size"
    try:
        width = numbers.find("moe_intermediate_size") or numbers.need(expert_key)
    except Uncounted as error:
        if any(numbers.config.get(name) for name in OTHER_WIDTHS):
            raise
        raise Incomplete(str(error)) from None
    moe_layers = _count_moe_layers(numbers, model.num_layers)
    shared = numbers.find("shared_expert_intermediate_size", 0) or (numbers.find("n_shared_experts", 0) or 0) * width
    attention, cache, cache_heads = _count_attention(numbers, hidden)
    weights = model.num_layers * attention
    weights += moe_layers * (3 * hidden * shared + hidden * model.num_experts)
    weights += (model.num_layers - moe_layers) * 3 * hidden * dense_width
    head = hidden * numbers.need("vocab_size") * plain / 8
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


def _count_moe_layers(numbers: Numbers, layers: int) -> int:
    """As Qwen (`decoder_sparse_step`, `mlp_only_layers`) and DeepSeek (`first_k_dense_replace`) say it."""
    config = numbers.config
    first = numbers.find("first_k_dense_replace", 0) or 0
    step = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
    step = step if isinstance(step, int) else 1
    dense = set(config.get("mlp_only_layers") or [])
    return sum(layer >= first and (layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def _count_attention(numbers: Numbers, hidden: int) -> tuple[int, int, int]:
    """(weights of one layer's attention, numbers it caches for a token, heads of the cache)."""
    heads = numbers.need("num_attention_heads")
    if rank := numbers.find("kv_lora_rank"):  # DeepSeek's latent attention
        nope, rope, value = (numbers.need(f"{name}_head_dim") for name in ("qk_nope", "qk_rope", "v"))
        q_rank = numbers.find("q_lora_rank")
        queries = heads * (nope + rope)
        weights = hidden * q_rank + q_rank * queries if q_rank else hidden * queries
        weights += hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        return weights, rank + rope, 1
    head_dim = numbers.find("head_dim") or hidden // heads
    cache_heads = numbers.find("num_key_value_heads") or heads
    cached = 2 * cache_heads * head_dim
    return hidden * (2 * heads * head_dim + cached), cached, cache_heads


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
    raise Uncounted(
        f"--model {folder}: quant_method {method} is not known; allowed is none, {', '.join(BITS)}, awq, gptq"
    )


def describe_weights(weights: Weights, flags: ServerFlags) -> dict[str, Any]:
    """Bytes of the model, and of what one GPU holds of it."""
    experts = weights.moe_layers * weights.model.num_experts * weights.expert
    return {
        "architecture": weights.model.architecture,
        "moe_layers": weights.moe_layers,
        "experts": weights.model.num_experts,
        "top_k": weights.model.top_k,
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
    experts = weights.moe_layers * (flags.slots or weights.model.num_experts + flags.redundant) * weights.expert
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
