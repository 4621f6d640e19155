"""Which expert-parallel rank holds which expert, as it is now: upstream may move experts while the server runs."""

from dataclasses import dataclass
from typing import Any

import torch

from ..upstream.configuration import NUM_EXPERTS, find_value
from ..upstream.routing import expert_locations
from ..upstream.server import model_config, resolved


@dataclass(frozen=True, eq=False)
class Placement:
    """`physical` [layers, N] holds every layer's physical number of each logical expert; ranks hold equal blocks of
    `per_rank` physical experts. Upstream writes to it in place, so that a captured graph reads where experts are.
    """

    ranks: int
    per_rank: int
    physical: torch.Tensor

    def rank_of_expert(self, layer_id: int) -> torch.Tensor:
        """[N] int, one layer's."""
        return self.physical[layer_id] // self.per_rank

    def count(self, layer_ids: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """How many of `experts` [m, N] bool each rank holds: [m, ranks] int64. `layer_ids` [m] int64."""
        ranks = (self.physical[layer_ids] // self.per_rank).long()
        found = experts.new_zeros((len(experts), self.ranks), dtype=torch.int64)
        return found.scatter_add_(1, ranks, experts.long())


def read_placement(model_runner: Any) -> Placement | None:
    """Where a loaded model's experts are: contiguous blocks, unless SGLang maps ids (--init-expert-location,
    --enable-eplb); of a redundant expert the first place counts. None on one rank.
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
