"""The number of bytes that a decode step reads, and the GPU memory that the weights leave free."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..compatibility.moe_model import MoeModel
from ..gpus import Gpu
from ..parser import LARGEST
from .bits import SCALED, read_bits
from .modules import list_modules
from .parts import sort_tensors
from .reading import Reading, read_flagged
from .server import ServerFlags, read_flags
from .tensors import Tensor, read_headers

UNREAD = ("dummy", "pt", "npcache")
"""Values of --load-format for which SGLang reads no safetensors. The weights then have the model's dtype."""
PACKED = ("bitsandbytes", "gguf")
"""Values of --load-format for which the bytes of the weights cannot be counted."""


@dataclass(frozen=True)
class Weights:
    """The sizes of a model's weights in bytes.

    - `moe_layers` is the number of layers with experts.
    - `expert` is the size of one expert in one layer.
    - `dense` is the size of all other weights that a decode step reads: attention, router, shared experts, layers
      without experts, and LM head.
    - `held` is the size of all weights except experts: `dense`, the embedding, and encoders for images or sound.
    - `cache` is the size of the KV cache for one token in all layers. At most `cache_heads` ranks divide the cache.
    - `bits` is the number of bits of an expert's weight, or None if an expert has its size in the checkpoint.
    - `source` is "safetensors" or "transformers".
    """

    model: MoeModel
    moe_layers: int
    expert: float
    dense: float
    held: float
    cache: float
    cache_heads: int
    bits: float | None
    source: str


def read_weights(folder: Path, flags: ServerFlags | None = None) -> Weights:
    """Count the weights of the model in a folder. Raises the errors of `read_flagged` and `count_weights`."""
    return count_weights(read_flagged(folder, flags or read_flags([])))


def count_weights(reading: Reading) -> Weights:
    """Count the weights of a model, in its safetensors or in the modules that transformers builds.

    In modules each weight has the bits of its quantization. Raises ValueError, with a message of one line, if neither
    source describes the model. Raises ModuleNotFoundError if transformers is needed but not installed.
    """
    if reading.load_format in PACKED:
        raise ValueError(f"--load-format {reading.load_format} has bytes that are not counted; must be another")
    model, text = reading.model, reading.text
    tensors = [] if reading.load_format in UNREAD else read_headers(reading.folder)
    source = "safetensors" if tensors else "transformers"
    # If a checkpoint has quantized tensors, SGLang does not quantize its other tensors.
    is_quantized = any(tensor.stored is not None and "scale" not in tensor.name for tensor in tensors)
    name = "none" if is_quantized else reading.quantization
    bits = read_bits(name, reading.declared, text.get("expert_dtype"), reading.plain)
    if reading.converts:
        bits = replace(bits, experts=reading.plain)
    if not tensors:
        tensors, text = list_modules(reading.config, reading.changes)

    def count(tensor: Tensor, is_expert: bool) -> float:
        if tensor.stored is not None:
            return tensor.stored * (reading.plain / SCALED["mxfp4"] if is_expert and reading.converts else 1.0)
        module, _, parameter = tensor.name.rpartition(".")
        is_linear = parameter == "weight" and len(tensor.shape) == 2 and tensor.shape[0] != model.num_experts
        return tensor.count * bits.count(module, is_expert, is_linear and "layers." in module) / 8

    parts = sort_tensors(tensors, model.num_experts, model.num_layers, text, count)
    return Weights(
        model=model,
        moe_layers=parts.moe_layers,
        expert=parts.experts / parts.moe_layers / model.num_experts,
        dense=parts.read,
        held=parts.held,
        cache=parts.cached * reading.cache_bits / 8,
        cache_heads=parts.cache_heads,
        bits=bits.experts if source == "transformers" or reading.converts else None,
        source=source,
    )


def describe_weights(weights: Weights, flags: ServerFlags) -> dict[str, Any]:
    """Return the report on the weights: the bytes of the model, and the bytes on each GPU."""
    experts = weights.moe_layers * weights.model.num_experts * weights.expert
    return {
        "source": weights.source,
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


def count_experts(weights: Weights, flags: ServerFlags) -> int:
    """Return how many experts of a layer all ranks together hold: at most the slots if experts are paged."""
    return min(flags.slots or LARGEST, weights.model.num_experts + flags.redundant)


def count_held(weights: Weights, flags: ServerFlags) -> tuple[float, float]:
    """Return the bytes of experts and the bytes of all other weights on one GPU.

    All ranks divide the experts, or the slots if experts are paged. The ranks of a data-parallel group divide the other
    weights. The stages of a pipeline divide both.
    """
    experts = weights.moe_layers * count_experts(weights, flags) * weights.expert
    shared = flags.ranks // flags.dp_size
    return experts / (flags.ranks * flags.stages), weights.held / (shared * flags.stages)


def count_cache(weights: Weights, flags: ServerFlags) -> float:
    """Return the number of bytes that one token takes in the KV cache of one GPU."""
    return divide(weights, flags).cache / flags.stages


def divide(weights: Weights, flags: ServerFlags) -> Weights:
    """Return the weights that one rank reads in a step. All stages of a pipeline count together.

    The rank reads a part of each expert and of all other weights. The ranks of a data-parallel group divide the heads
    of the KV cache. If there are more ranks than heads, several ranks hold the same head.
    """
    shared = flags.ranks // flags.dp_size
    return replace(
        weights,
        expert=weights.expert * flags.ep_size / flags.ranks,
        dense=weights.dense / shared,
        cache=weights.cache / min(shared, weights.cache_heads),
    )


def describe_memory(weights: Weights, flags: ServerFlags, gpu: Gpu, cached: int) -> dict[str, Any]:
    """Return the report on GPU memory: its size, and the part that the weights leave for the KV cache.

    If the weights do not fit, the report also contains `resident_experts`. This is the number of experts of a layer
    that would fit beside `cached` tokens of KV cache. Without --mem-fraction-static the weights may use all of the
    memory.
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
        fitting = int(count_experts(weights, flags) * beside / experts)
        report["resident_experts"] = max(0, min(fitting, weights.model.num_experts))
    return report
