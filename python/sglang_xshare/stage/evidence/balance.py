"""How evenly active experts lie on expert-parallel ranks: a step waits for the rank that has most (XShare, Table 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...types import Selection
from ..placement import Placement


class Balance:
    """Counts on the device, as `Counters` does, in some ten small operations a step."""

    def __init__(self, placement: Placement, layer_ids: Sequence[int], device: str) -> None:
        self.placement = placement
        self._layer_ids = torch.tensor(layer_ids, device=device)
        self._members: dict[tuple[bool, ...], torch.Tensor] = {}
        self.totals = torch.zeros(len(layer_ids), 5, dtype=torch.float64, device=device)

    def count(self, selections: Sequence[Selection | None]) -> torch.Tensor:
        """Count one step: every layer's selection, None where it stayed vanilla, at least one other.

        Returns [layers, 5] float64, a `RankLoad` of each, and adds it to the totals; all zero for a vanilla layer, or
        without a live row.
        """
        found = [selection for selection in selections if selection is not None]
        members = self._find_members(tuple(selection is not None for selection in selections))
        ids = self._layer_ids[members]
        before, after = (
            self.placement.count(ids, torch.stack([getattr(selection, name) for selection in found])).double()
            for name in ("vanilla_active", "active")
        )
        largest = before.amax(1), after.amax(1)
        rows = torch.stack([largest[0] > 0, *largest, before.mean(1), after.mean(1)], 1)
        counts = torch.zeros_like(self.totals).index_copy_(0, members, rows)
        self.totals += counts
        return counts

    def _find_members(self, selecting: tuple[bool, ...]) -> torch.Tensor:
        """The selecting layers. Copied from the host once, in a run before any capture, and kept for its graphs."""
        if selecting not in self._members:
            numbers = [number for number, selects in enumerate(selecting) if selects]
            self._members[selecting] = torch.tensor(numbers, device=self.totals.device)
        return self._members[selecting]


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
