"""The experts of each expert-parallel rank, as they are now: upstream may move experts while the server runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..types import Tally


@dataclass(frozen=True, eq=False)
class Placement:
    """The physical experts of every layer, `per_rank` on each rank, numbered in the order of the ranks.

    `physical` [layers, N] holds the physical number of each expert of the router. Upstream writes to `physical` in
    place, so a captured graph reads the current numbers.
    """

    ranks: int
    per_rank: int
    physical: torch.Tensor

    def rank_of_expert(self, layer_id: int) -> torch.Tensor:
        """Return [N] int, the ranks of a layer's experts."""
        return self.physical[layer_id] // self.per_rank

    def count(self, layer_ids: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return [m, ranks] int64, the number of `experts` [m, N] bool on each rank; `layer_ids` [m] are int64."""
        ranks = (self.physical[layer_ids] // self.per_rank).long()
        found = experts.new_zeros((len(experts), self.ranks), dtype=torch.int64)
        return found.scatter_add_(1, ranks, experts.long())


class Balance:
    """Counts, on the device, of the active experts on the fullest expert-parallel rank.

    A step waits for this rank (XShare, Table 2). Counting takes a few small operations a step.
    """

    def __init__(self, placement: Placement, layer_ids: Sequence[int], device: str) -> None:
        self.placement = placement
        self._layer_ids = torch.tensor(layer_ids, device=device)
        self.totals = torch.zeros(len(layer_ids), 2, dtype=torch.float64, device=device)
        """Active experts of the fullest rank under vanilla routing, and under the policy."""

    def count(self, tally: Tally) -> torch.Tensor:
        """Count one step of every layer's `tally`. Return what is added to `totals`, [layers, 2] float64.

        The result is 0 for a layer that stayed vanilla, and without a live row.
        """
        found = [self.placement.count(self._layer_ids, one) for one in (tally.vanilla_active, tally.active)]
        counts = torch.stack([ranks.amax(1) for ranks in found], 1).double()
        counts *= counts[:, :1] > 0
        self.totals += counts
        return counts
