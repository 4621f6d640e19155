"""The placement of a loaded model's experts on expert-parallel ranks."""

from typing import Any

import torch

from ..stage.placement import Placement
from ..upstream.configuration import NUM_EXPERTS, find_value
from ..upstream.routing import expert_locations
from ..upstream.server import model_config, resolved


def read_placement(model_runner: Any) -> Placement | None:
    """Return the placement of a loaded model's experts; None on one rank.

    Ranks hold contiguous blocks, unless SGLang maps ids (--init-expert-location, --enable-eplb). A redundant expert
    counts at its first place.
    """
    config = resolved(model_runner.server_args)
    if config.ep_size == 1:
        return None
    physical = expert_locations(config)
    if physical is None:
        model = model_config(model_runner.server_args)
        experts = torch.arange(find_value(model.hf_text_config, NUM_EXPERTS), device=model_runner.device)
        physical = experts.expand(model.num_hidden_layers, -1)
    return Placement(config.ep_size, (physical.shape[1] + config.ep_num_redundant_experts) // config.ep_size, physical)
