"""What other plans would have chosen in steps that are routed as the model routes: `--expert-policy observe`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...policies.plan import SelectionPlan
from ...policies.schedule import Schedule
from ...types import Selection, Tally
from ...upstream.paging import Residents
from ..layer import Layer
from ..step import Step
from .counters import AFTER, BEFORE, KEPT, PAGED, PAGED_BEFORE, RESCUED, ROWS, Counters
from .interval import Interval


class Observation:
    """Selects by plans of `observe` beside the model's own routing. A plan costs a selection a layer, and a count."""

    def __init__(
        self, schedule: Schedule, layer_ids: Sequence[int], device: str, residents: Residents | None = None
    ) -> None:
        self.schedule = schedule
        self.counters = {spelling: Counters(len(layer_ids), device, residents) for spelling in schedule.observed}
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

    @property
    def tables(self) -> Tally | None:
        """Those of the step at hand by the model's own routing; None before a layer has selected."""
        tables = next(iter(self.counters.values())).tables
        return None if tables is None else replace(tables, active=tables.vanilla_active)

    def count(self, step: Step) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Count one step. Returns the model's own and each plan's counts [layers, 10] float64, as `Counters.count`."""
        counts = [counters.count(step) for counters in self.counters.values()]
        own = counts[0].clone()
        own[:, AFTER], own[:, KEPT], own[:, RESCUED] = own[:, BEFORE], own[:, ROWS], 0
        own[:, PAGED] = own[:, PAGED_BEFORE]
        return own, counts


def format_observed(plans: Mapping[str, Interval]) -> str:
    """The comparison's part of the decode log line."""
    text = ""
    for spelling, interval in plans.items():
        if interval.layer_steps:
            paged = "" if interval.page_ins is None else f"page-ins {interval.mean('page_ins'):.1f}, "
            kept = f"({paged}kept mass {interval.mean_kept_mass:.4f})"
            text += f", {spelling} would keep {interval.mean('experts_after'):.1f} {kept}"
    return text
