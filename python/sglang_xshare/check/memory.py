"""Whether the weights fit a GPU, and what they leave of it for the KV cache."""

from dataclasses import replace
from typing import Any

from ..gpus import Gpu
from .server import ServerFlags
from .weights import Weights


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
