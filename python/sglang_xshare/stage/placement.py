"""The placement of experts on expert-parallel ranks. SGLang may move experts while the server runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..types import Tally


@dataclass(frozen=True, eq=False)
class Placement:
    """The physical experts of every layer, numbered in the order of the ranks.

    Each rank has `per_rank` physical experts. `physical` [layers, N] contains the physical number of each of the
    router's experts. SGLang updates `physical` in place, so a captured graph reads the current numbers.
    """

    ranks: int
    per_rank: int
    physical: torch.Tensor

    def rank_of_expert(self, layer_id: int) -> torch.Tensor:
        """Return the rank of each expert of a layer, [N] int."""
        return self.physical[layer_id] // self.per_rank

    def count(self, layer_ids: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return how many of the marked experts are on each rank, [m, ranks] int64.

        `experts` [m, N] bool marks experts of m layers. `layer_ids` [m] int64 contains the ids of these layers.
        """
        ranks = (self.physical[layer_ids] // self.per_rank).long()
        found = experts.new_zeros((len(experts), self.ranks), dtype=torch.int64)
        return found.scatter_add_(1, ranks, experts.long())


class Balance:
    """Counters of the active experts on the fullest expert-parallel rank: the rank with the most active experts.

    In each step the other ranks wait for the fullest rank (XShare, Table 2). The device counts with a few small
    operations in each step.
    """

    def __init__(self, placement: Placement, layer_ids: Sequence[int], device: str) -> None:
        self.placement = placement
        self._layer_ids = torch.tensor(layer_ids, device=device)
        self.totals = torch.zeros(len(layer_ids), 2, dtype=torch.float64, device=device)
        """Two columns: the active experts on the fullest rank under vanilla routing, and those under the policy."""

    def count(self, tally: Tally) -> torch.Tensor:
        """Add the counts of one step to the totals. Return the added counts, [layers, 2] float64.

        `tally` is the step's tally of all layers. The counts are 0 for a layer that stayed vanilla, and for a step
        without a live row.
        """
        found = [self.placement.count(self._layer_ids, one) for one in (tally.vanilla_active, tally.active)]
        counts = torch.stack([ranks.amax(1) for ranks in found], 1).double()
        counts *= counts[:, :1] > 0
        self.totals += counts
        return counts
