"""Latency from the bytes that a step reads, over the memory's bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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


def estimate_step(weights: Weights, experts: float, cached: float, bandwidth: float) -> Latency:
    """Seconds of a decode step in which a GPU loads so many `experts` a layer, and `cached` tokens of KV cache.
    `bandwidth` is its memory's peak in bytes/s. On several ranks it is the rank that the step waits for.

    Activations, sampling, the host, exchanges between ranks and the selection itself are not in it; nothing hides
    behind anything else.
    """
    reached = REACHED * bandwidth
    layer = FIXED + experts * weights.expert / reached
    rest = (weights.dense + cached * weights.cache) / reached
    return Latency(layer, rest, weights.moe_layers * layer + rest)
