"""Where a loaded model's experts are, on which expert-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch

from ..stage.placement import Placement
from ..stage.upstream.routing import expert_locations
from ..stage.upstream.server import model_config, resolved
from .model import read_model


def read_placement(model_runner: Any) -> Placement | None:
    """Where a loaded model's experts are; None on one rank.

    Contiguous blocks, unless SGLang maps ids to where it has put the experts (--init-expert-location, --enable-eplb).
    Of a redundant expert the first place counts, which is one of several.
    """
    config = resolved(model_runner.server_args)
    if config.ep_size == 1:
        return None
    physical = expert_locations(config)
    if physical is None:
        model = read_model(model_config(model_runner.server_args), config.model_path)
        experts = torch.arange(model.num_experts, device=model_runner.device)
        physical = experts.expand(model.num_layers, -1)
    return Placement(config.ep_size, (physical.shape[1] + config.ep_num_redundant_experts) // config.ep_size, physical)
