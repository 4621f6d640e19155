"""The counters of a plan source: of the policy that acts, or of a plan that `--expert-policy observe` compares."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..policies.schedule import Schedule
from .record.counters import AFTER, BEFORE, KEPT, PAGED, PAGED_BEFORE, RESCUED, ROWS, Counters, Reader


class Lane:
    """The `counters` of one plan source, and their readers.

    `name` is the spelling of an observed plan; None for the policy that acts. Log, metrics and `GET /expert_policy`
    each read what was counted since their own last read.
    """

    def __init__(self, name: str | None, counters: Counters) -> None:
        self.name = name
        self.counters = counters
        self.logged, self.exported, self.since_switch = (Reader(counters) for _ in range(3))


def make_lanes(schedule: Schedule | None, acting: Lane) -> list[Lane]:
    """Return the silent lanes of a schedule beside the acting lane, none if the schedule acts."""
    observed = schedule.observed if schedule is not None else ()
    return [Lane(spelling, acting.counters.make_alike()) for spelling in observed]


def count_vanilla(counts: torch.Tensor) -> torch.Tensor:
    """Return `counts` [layers, COLUMNS] of a silent lane as the model's own routing would have them."""
    own = counts.clone()
    own[:, AFTER], own[:, KEPT], own[:, RESCUED] = own[:, BEFORE], own[:, ROWS], 0
    own[:, PAGED] = own[:, PAGED_BEFORE]
    return own


def format_observed(lanes: Sequence[Lane]) -> str:
    """Return the part of the decode log line that compares `lanes`, since the last such line."""
    text = ""
    for lane in lanes:
        interval = lane.logged.read()
        if interval.layer_steps:
            paged = "" if interval.page_ins is None else f"page-ins {interval.mean('page_ins'):.1f}, "
            kept = f"({paged}kept mass {interval.mean_kept_mass:.4f})"
            text += f", {lane.name} would keep {interval.mean('experts_after'):.1f} {kept}"
    return text
