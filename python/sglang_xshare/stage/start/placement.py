"""Which rank holds which expert, for policies that balance expert-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch

from ..upstream import model_config, resolved
from .model import read_model


def read_placement(model_runner: Any) -> torch.Tensor | None:
    """[N] int64 rank of every logical expert under SGLang's trivial placement (contiguous blocks); None on one rank."""
    config = resolved(model_runner.server_args)
    if config.ep_size == 1:
        return None
    num_experts = read_model(model_config(model_runner.server_args), config.model_path).num_experts
    return torch.arange(num_experts, device=model_runner.device) // (num_experts // config.ep_size)
