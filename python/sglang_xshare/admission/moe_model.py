"""A Mixture-of-Experts model, as far as a schedule must fit it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MoeModel:
    """What the configuration of a Mixture-of-Experts model says of it; `top_k`, `scoring` and `renormalize` as in
    `Router`. `path` is the server's --model-path.
    """

    path: str
    architecture: str
    num_layers: int
    num_experts: int
    top_k: int
    scoring: str
    renormalize: bool
