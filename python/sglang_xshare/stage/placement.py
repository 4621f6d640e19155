"""Which expert-parallel rank holds which expert, as it is now: upstream may move experts while the server runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
