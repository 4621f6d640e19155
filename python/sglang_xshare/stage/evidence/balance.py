"""How evenly active experts lie on expert-parallel ranks: a step waits for the rank that has most (XShare, Table 2)."""

from collections.abc import Sequence

import torch

from ...types import Tally
from ..placement import Placement


class Balance:
    """Counts on the device, as `Counters` does, in a few small operations a step."""

    def __init__(self, placement: Placement, layer_ids: Sequence[int], device: str) -> None:
        self.placement = placement
        self._layer_ids = torch.tensor(layer_ids, device=device)
        self.totals = torch.zeros(len(layer_ids), 2, dtype=torch.float64, device=device)
        """Active experts of the fullest rank under vanilla routing, and under the policy."""

    def count(self, tables: Tally) -> torch.Tensor:
        """Count one step of every layer's `tables`. Returns what is added to `totals`: 0 for a layer that stayed
        vanilla, and without a live row.
        """
        before, after = (
            self.placement.count(self._layer_ids, experts).amax(1).double()
            for experts in (tables.vanilla_active, tables.active)
        )
        counts = torch.stack([before, after], 1) * (before > 0)[:, None]
        self.totals += counts
        return counts
