"""What other plans would have chosen in steps that are routed as the model routes: `--expert-policy observe`."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from ...policies.plan import SelectionPlan
from ...policies.schedule import Schedule
from ...types import Selection
from ...upstream.paging import Residents
from ..layer import Layer
from ..step import Step
from .counters import AFTER, BEFORE, KEPT, PAGED, PAGED_BEFORE, RESCUED, ROWS, Counters, Reader
from .interval import Interval

ROW_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""The most router rows of each class of batch sizes; the last class has more."""
SIZES = ["1", "2", *(f"{low + 1}-{high}" for low, high in pairwise(ROW_BOUNDS[1:])), "257-"]


class Observation:
    """Selects by plans of `observe` beside the model's own routing. A plan costs a selection a layer, and a count."""

    def __init__(
        self, schedule: Schedule, layer_ids: Sequence[int], device: str, residents: Residents | None = None
    ) -> None:
        self.schedule = schedule
        self.counters = {spelling: Counters(len(layer_ids), device, residents) for spelling in schedule.observed}
        self.sizes = torch.zeros(len(SIZES), dtype=torch.int64, device=device)
        """Steps by live router rows."""
        self._bounds = torch.tensor(ROW_BOUNDS, device=device)
        self._numbers = {layer_id: number for number, layer_id in enumerate(layer_ids)}

    def observe(self, layer: Layer, logits: torch.Tensor) -> None:
        """Select by every plan on a layer's router logits [n, N]. What plans have in common is selected once."""
        plans = self.schedule.plans_for(layer.layer_id, layer.step.phase, layer.step.rows)
        chosen: dict[SelectionPlan, Selection] = {}
        for plan, counters in zip(plans, self.counters.values(), strict=True):
            tally = counters.tally(self._numbers[layer.layer_id], logits)
            if plan not in chosen:
                chosen[plan] = layer.select(logits, plan, tally=tally)
            elif tally is not None:
                tally.take(chosen[plan])
        layer.selection = chosen[plans[0]]

    def count(self, step: Step) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Count one step. Returns the model's own and each plan's counts [layers, 10] float64, as `Counters.count`."""
        counts = [counters.count(step) for counters in self.counters.values()]
        own = counts[0].clone()
        own[:, AFTER], own[:, KEPT], own[:, RESCUED] = own[:, BEFORE], own[:, ROWS], 0
        own[:, PAGED] = own[:, PAGED_BEFORE]
        rows = own[:1, ROWS]
        self.sizes.index_add_(0, torch.bucketize(rows, self._bounds), (rows > 0).to(self.sizes.dtype))
        return own, counts


class Observed(NamedTuple):
    """What was observed since the last report: intervals by plan, and steps by batch size."""

    plans: dict[str, Interval]
    sizes: dict[str, int]


class ObservationReader:
    """Reads what was observed since its own last look, as `Reader` does."""

    def __init__(self, observation: Observation) -> None:
        self._readers = {spelling: Reader(counters) for spelling, counters in observation.counters.items()}
        self._sizes = observation.sizes
        self._seen = [0] * len(SIZES)

    def read(self) -> Observed:
        """Waits for the device."""
        sizes = self._sizes.tolist()
        new = {name: now - then for name, now, then in zip(SIZES, sizes, self._seen, strict=True)}
        self._seen = sizes
        return Observed({spelling: reader.read() for spelling, reader in self._readers.items()}, new)


def format_observed(plans: Mapping[str, Interval]) -> str:
    """The comparison's part of the decode log line."""
    text = ""
    for spelling, interval in plans.items():
        if interval.layer_steps:
            paged = "" if interval.mean_page_ins is None else f"page-ins {interval.mean_page_ins:.1f}, "
            text += (
                f", {spelling} would keep {interval.mean_after:.1f} ({paged}kept mass {interval.mean_kept_mass:.4f})"
            )
    return text
