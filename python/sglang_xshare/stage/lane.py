"""Lanes: counters of the active policy, and counters of each plan that `--expert-policy observe` compares."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..policies.schedule import Schedule
from .record.counters import AFTER, BEFORE, KEPT, PAGED, PAGED_BEFORE, RESCUED, ROWS, Counters, Reader


class Lane:
    """The counters of the active policy or of one observed plan, and the readers of these counters.

    The acting lane counts the experts that are active in the server's steps. These are the experts of the active
    policy, or under `observe` the experts of the model's own routing. The `name` of this lane is None. An observed lane
    counts the experts that one plan of `observe` would select. Its `name` is this plan as a string, such as
    "xshare:k0=1".

    A lane has three readers. `logged` returns the counts since the last log line. `exported` returns the counts since
    the last update of the metrics. `since_switch` returns the counts since the last switch, for GET /expert_policy.
    """

    def __init__(self, name: str | None, counters: Counters) -> None:
        self.name = name
        self.counters = counters
        self.logged, self.exported, self.since_switch = (Reader(counters) for _ in range(3))


def make_lanes(schedule: Schedule | None, acting: Lane) -> list[Lane]:
    """Create a lane for each plan that `schedule` observes. The lanes count the same MoE layers as `acting`."""
    observed = schedule.observed if schedule is not None else ()
    return [Lane(spelling, acting.counters.make_alike()) for spelling in observed]


def count_vanilla(counts: torch.Tensor) -> torch.Tensor:
    """Return the counts of the model's own routing.

    `counts` [layers, COLUMNS] are the counts of any observed lane. They also contain the number of experts that vanilla
    routing activates.
    """
    own = counts.clone()
    own[:, AFTER], own[:, KEPT], own[:, RESCUED] = own[:, BEFORE], own[:, ROWS], 0
    own[:, PAGED] = own[:, PAGED_BEFORE]
    return own


def format_observed(lanes: Sequence[Lane]) -> str:
    """Return the part of the decode log line with the counts of each observed lane since the last line."""
    text = ""
    for lane in lanes:
        interval = lane.logged.read()
        if interval.layer_steps:
            paged = "" if interval.page_ins is None else f"page-ins {interval.mean('page_ins'):.1f}, "
            kept = f"({paged}kept mass {interval.mean_kept_mass:.4f})"
            text += f", {lane.name} would keep {interval.mean('experts_after'):.1f} {kept}"
    return text
