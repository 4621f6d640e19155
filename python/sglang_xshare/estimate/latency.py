"""Latency from bytes: a line through OEA's measurements of one MoE layer, and bandwidth for everything else."""

from __future__ import annotations

from dataclasses import dataclass

from .weights import Weights

FIXED = 34e-6
"""Seconds that a MoE layer takes apart from its experts' weights (OEA, H100). Kept as it is on other GPUs."""
REACHED = 0.97
"""Share of the memory's peak at which experts are loaded: 2.9 us for one of Qwen3-30B-A3B's, 9.4 MB (OEA, H100)."""


@dataclass(frozen=True)
class Latency:
    """Estimated seconds: of one MoE layer, of all layers' other weights and KV cache, of the step."""

    layer: float
    rest: float
    step: float


def estimate_layer(expert_bytes: float, active: float, bandwidth: float) -> float:
    """Seconds of one MoE layer with `active` experts; `bandwidth` is the memory's peak in bytes/s."""
    return FIXED + active * expert_bytes / (REACHED * bandwidth)


def estimate_step(weights: Weights, active: float, bandwidth: float, rows: int, cached_tokens: int) -> Latency:
    """Seconds of a decode step of `rows` rows on one GPU; `cached_tokens` is the KV cache's, of all requests.

    Activations, sampling, the host, and the selection itself are not in it.
    """
    layer = estimate_layer(weights.expert, active, bandwidth)
    rest = (weights.dense + weights.cache * cached_tokens) / (REACHED * bandwidth)
    return Latency(layer, rest, weights.moe_layers * layer + rest)


def ratio_of_bytes(weights: Weights, before: float, after: float) -> float:
    """The share of a step's weights that are still read with `after` active experts of `before`: what the step's time
    would be in proportion, were bandwidth all.
    """
    read = [weights.dense + weights.moe_layers * active * weights.expert for active in (after, before)]
    return read[0] / read[1]
