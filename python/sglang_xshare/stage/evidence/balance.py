"""How evenly active experts lie on expert-parallel ranks: a step waits for the rank that has most (XShare, Table 2)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...types import Tally
from ..placement import Placement


class Balance:
    """Counts on the device, as `Counters` does, in some ten small operations a step."""

    def __init__(self, placement: Placement, layer_ids: Sequence[int], device: str) -> None:
        self.placement = placement
        self._layer_ids = torch.tensor(layer_ids, device=device)
        self.totals = torch.zeros(len(layer_ids), 5, dtype=torch.float64, device=device)

    def count(self, tables: Tally) -> torch.Tensor:
        """Count one step of every layer's `tables`. Returns [layers, 5] float64, a `RankLoad` of each, which is added
        to the totals: 0 for a layer that stayed vanilla, and without a live row.
        """
        before, after = (
            self.placement.count(self._layer_ids, experts).double()
            for experts in (tables.vanilla_active, tables.active)
        )
        largest = before.amax(1), after.amax(1)
        selects = largest[0] > 0
        counts = torch.stack([selects, *largest, before.mean(1), after.mean(1)], 1) * selects[:, None]
        self.totals += counts
        return counts


@dataclass(frozen=True)
class RankLoad:
    """What happened since the last report, summed over layers and steps."""

    layer_steps: int
    largest_before: float
    largest_after: float
    mean_before: float
    mean_after: float


class BalanceReader:
    """Reads what was counted since its own last look."""

    def __init__(self, balance: Balance) -> None:
        self._balance = balance
        self._totals = [0.0] * balance.totals.shape[1]

    def read(self) -> RankLoad:
        """Waits for the device."""
        totals = self._balance.totals.sum(0).tolist()
        steps, *new = (now - then for now, then in zip(totals, self._totals, strict=True))
        self._totals = totals
        return RankLoad(int(steps), *new)


def format_balance(load: RankLoad) -> str:
    """The ranks' part of the decode log line."""
    if not load.layer_steps:
        return ""
    largest, mean = (
        f"{before / load.layer_steps:.1f} -> {after / load.layer_steps:.1f}"
        for before, after in ((load.largest_before, load.largest_after), (load.mean_before, load.mean_after))
    )
    return f", active experts of the fullest rank: {largest}, of a rank: {mean}"
