"""The bytes that a decode step of a model reads, and the memory that a GPU has left beside the weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..compatibility.moe_model import MoeModel
from ..gpus import Gpu
from ..parser import LARGEST
from .bits import read_bits
from .modules import list_modules
from .parts import sort_tensors
from .reading import Reading, read_flagged
from .server import ServerFlags, read_flags
from .tensors import Tensor, read_headers

UNREAD = ("dummy", "pt", "npcache")
"""Values of --load-format that read no safetensors; the weights then have the model's dtype."""
PACKED = ("bitsandbytes", "gguf")
"""Values of --load-format whose bytes cannot be counted from safetensors or modules."""


@dataclass(frozen=True)
class Weights:
    """A model, its layers with experts, and its bytes.

    `expert`: bytes of one expert in one layer. `dense`: bytes of all else that a decode step reads: attention, router,
    shared experts, layers without experts, the head. `held`: bytes of `dense`, the embedding and the encoders of images
    or sound. `cache`: bytes of the KV cache for one token in all layers; up to `cache_heads` ranks divide the cache.
    `bits`: bits of an expert's weight, None if the checkpoint's own bytes were counted. `source`: "safetensors" or
    "transformers".
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
    """Count the weights of a folder's model with a server's flags. Raises as `read_flagged` and `count_weights`."""
    return count_weights(read_flagged(folder, flags or read_flags([])))


def count_weights(reading: Reading) -> Weights:
    """Count a model's weights, from the headers of its safetensors or from its modules as transformers builds them.

    Modules count at the bits of their quantization. Raises ValueError, one line, for a model that neither source
    describes, and ModuleNotFoundError if transformers is needed and missing.
    """
    if reading.load_format in PACKED:
        raise ValueError(f"--load-format {reading.load_format} has bytes that are not counted; must be another")
    model, text = reading.model, reading.text
    tensors = [] if reading.load_format in UNREAD else read_headers(reading.folder)
    source = "safetensors" if tensors else "transformers"
    # A checkpoint with quantized tensors stores its other tensors in the dtype in which they are served.
    is_quantized = any(tensor.stored is not None and "scale" not in tensor.name for tensor in tensors)
    name = "none" if is_quantized else reading.quantization
    bits = read_bits(name, reading.declared, text.get("expert_dtype"), reading.plain)
    if not tensors:
        tensors, text = list_modules(reading.config, reading.changes)

    def count(tensor: Tensor, is_expert: bool) -> float:
        if tensor.stored is not None:
            return float(tensor.stored)
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
        bits=bits.experts if source == "transformers" else None,
        source=source,
    )


def describe_weights(weights: Weights, flags: ServerFlags) -> dict[str, Any]:
    """Return the bytes of the model and of one GPU's part."""
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
    """Return the experts of a layer that all ranks together hold: no more than the slots if experts are paged."""
    return min(flags.slots or LARGEST, weights.model.num_experts + flags.redundant)


def count_held(weights: Weights, flags: ServerFlags) -> tuple[float, float]:
    """Return (bytes of experts, bytes of all else) of one GPU.

    All ranks divide the experts, or their slots if experts are paged; the ranks of one data-parallel group divide all
    else; the stages of a pipeline divide both.
    """
    experts = weights.moe_layers * count_experts(weights, flags) * weights.expert
    shared = flags.ranks // flags.dp_size
    return experts / (flags.ranks * flags.stages), weights.held / (shared * flags.stages)


def count_cache(weights: Weights, flags: ServerFlags) -> float:
    """Return the bytes of KV cache on one GPU for one token of one of its requests."""
    return divide(weights, flags).cache / flags.stages


def divide(weights: Weights, flags: ServerFlags) -> Weights:
    """Return what one rank reads in a step through all pipeline stages: a part of each expert, a share of all else.

    The ranks of a data-parallel group divide the heads of the KV cache, up to the number of heads.
    """
    shared = flags.ranks // flags.dp_size
    return replace(
        weights,
        expert=weights.expert * flags.ep_size / flags.ranks,
        dense=weights.dense / shared,
        cache=weights.cache / min(shared, weights.cache_heads),
    )


def describe_memory(weights: Weights, flags: ServerFlags, gpu: Gpu, cached: int) -> dict[str, Any]:
    """Return how much of each GPU's memory the weights leave.

    If the weights do not fit, also return how many experts of a layer fit beside `cached` tokens of KV cache. Without
    --mem-fraction-static all of the memory counts.
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
