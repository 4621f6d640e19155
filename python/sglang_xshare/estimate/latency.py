"""Latency from what a step does: constants of GPUs that others have measured, and bytes over bandwidth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .deployment import Deployment, Load, Requests, layer_work, rest_work
from .machine import Machine, Work

if TYPE_CHECKING:
    from .weights import Weights

FIXED = 34e-6
"""Seconds that a MoE layer takes apart from its experts' weights (OEA, H100). Kept as it is on other GPUs."""
REACHED = 0.97
"""Share of the memory's peak at which experts are loaded: 2.9 us for one of Qwen3-30B-A3B's, 9.4 MB (OEA, H100)."""


@dataclass(frozen=True)
class Link:
    """Between ranks: seconds of an exchange, and bytes/s that a rank sends."""

    latency: float
    bandwidth: float


# Fitted to what DeepEP has published of its low-latency kernels on H800 (`benchmark/cost/published.py`), whose NVLink
# has half the bandwidth of an H100's.
NEAR = Link(51.7e-6, 233e9)
"""Of ranks in one node, over NVLink."""
FAR = Link(12.7e-6, 42.2e9)
"""Of ranks in several nodes, each with 400 Gb/s InfiniBand."""


@dataclass(frozen=True)
class Latency:
    """Estimated seconds: of one MoE layer, of all layers' other weights and KV cache, of the step."""

    layer: float
    rest: float
    step: float


def gpu_machine(bandwidth: float, flops: float | None = None, near: Link = NEAR, far: Link = FAR) -> Machine:
    """GPUs whose memory's peak is `bandwidth` bytes/s. They compute `flops` operations/s; None leaves that out."""
    return Machine(
        layers=FIXED,
        read=1 / (REACHED * bandwidth),
        flops=1 / flops if flops else 0.0,
        near=near.latency,
        near_bytes=1 / near.bandwidth,
        far=far.latency,
        far_bytes=1 / far.bandwidth,
    )


def estimate_layer(expert_bytes: float, active: float, bandwidth: float) -> float:
    """Seconds of one MoE layer with `active` experts on one GPU; `bandwidth` is the memory's peak in bytes/s."""
    return gpu_machine(bandwidth).time(Work(layers=1, read=active * expert_bytes))


def estimate_step(
    machine: Machine, weights: Weights, deployment: Deployment, load: Load, requests: Requests
) -> Latency:
    """Seconds of a decode step of these requests.

    Activations, sampling, the host, and the selection itself are not in it; nothing hides behind anything else.
    """
    layer = machine.time(layer_work(weights, deployment, load, requests))
    rest = machine.time(rest_work(weights, deployment, requests))
    return Latency(layer, rest, weights.moe_layers * layer + rest)


def ratio_of_bytes(weights: Weights, before: float, after: float) -> float:
    """The share of a step's weights that are still read with `after` active experts of `before`: what the step's time
    would be in proportion, were bandwidth all.
    """
    read = [weights.dense + weights.moe_layers * active * weights.expert for active in (after, before)]
    return read[0] / read[1]
