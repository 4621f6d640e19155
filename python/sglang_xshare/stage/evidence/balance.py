"""How evenly active experts lie on expert-parallel ranks: a step waits for the rank that has most (XShare, Table 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...types import Selection
from ..placement import Placement
from .metrics import PREFIX

STEPS, LARGEST_BEFORE, LARGEST_AFTER, MEAN_BEFORE, MEAN_AFTER = range(5)
"""Columns of what is counted a layer: the active experts of the rank that has most, and the mean of all ranks."""


class Balance:
    """Counts on the device, as `Counters` does, in some ten small operations a step."""

    def __init__(self, placement: Placement, layer_ids: Sequence[int], device: str) -> None:
        self.placement = placement
        self._layer_ids = torch.tensor(layer_ids, device=device)
        self._members: dict[tuple[bool, ...], torch.Tensor] = {}
        self.totals = torch.zeros(len(layer_ids), 5, dtype=torch.float64, device=device)

    def count(self, selections: Sequence[Selection | None]) -> torch.Tensor:
        """Count one step: every layer's selection, None where it stayed vanilla, at least one other.

        Returns [layers, 5] float64 and adds it to the totals; all zero for a vanilla layer, or without a live row.
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


class BalanceExporter:
    """The prometheus metrics of ranks, made at the first export, as `Exporter`'s are."""

    def __init__(self) -> None:
        self._metrics: dict[str, Any] = {}

    def export(self, load: RankLoad, labels: dict[str, str]) -> None:
        """Add an interval to the counters and set the gauges to its means."""
        if not self._metrics:
            self._metrics = _make_metrics(tuple(labels))
        totals = {
            "fullest_rank_before": load.largest_before,
            "fullest_rank_after": load.largest_after,
            "mean_rank_before": load.mean_before,
            "mean_rank_after": load.mean_after,
        }
        for name, total in totals.items():
            self._metrics[f"total_{name}"].labels(**labels).inc(total)
            if load.layer_steps:
                self._metrics[f"recent_{name}"].labels(**labels).set(total / load.layer_steps)


def _make_metrics(labels: tuple[str, ...]) -> dict[str, Any]:
    from prometheus_client import Counter, Gauge

    ranks = {"fullest_rank": "the expert-parallel rank that has most", "mean_rank": "the mean of expert-parallel ranks"}
    experts = {"before": "that vanilla routing would have woken", "after": "that are active"}
    metrics: dict[str, Any] = {}
    for rank, where in ranks.items():
        for name, which in experts.items():
            text = f"Experts {which} on {where}"
            metrics[f"total_{rank}_{name}"] = Counter(
                f"{PREFIX}{rank}_experts_{name}", f"{text}, summed over layers and steps", labels
            )
            metrics[f"recent_{rank}_{name}"] = Gauge(
                f"{PREFIX}{rank}_active_experts_{name}",
                f"{text}, mean of a layer and step, last interval",
                labels,
                multiprocess_mode="mostrecent",
            )
    return metrics
