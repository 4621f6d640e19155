"""One forward of the model runner: what its layers are to do, and what they have selected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..types import Selection
from .evidence.counters import Counters, Tables
from .step import Step, StepKey

if TYPE_CHECKING:
    from ..policies.plan import SelectionPlan
    from ..policies.schedule import Schedule
    from ..selection.cpu_call import Call
    from ..selection.triton_kernel.budgets import Budgets
    from .handover import Offer
    from .in_force import InForce

    Calls = dict[tuple[object, ...], tuple[SelectionPlan, Call | None]]


class PolicyBypassed(RuntimeError):
    """A step under policy in which some MoE layer did not select: the server stops."""


@dataclass(frozen=True)
class Assignment:
    """What a layer does in one forward: no `plan` leaves the routing to the model, no `step` says that there is none.
    A graph that is being captured reads the plan's numbers from `buffer`, where a switch writes them. `fits` says that
    the experts that are active fit the layer's slots, whatever the logits.
    """

    plan: SelectionPlan | None = None
    step: Step | None = None
    buffer: Budgets | None = None
    fits: bool = False


class Frame:
    """One forward of the model runner, from its begin to its end. All that is known of the forward is here.

    `key` is that of the runner's batch, None if the forward is no step; a graph's size, or padding, may change the rows
    that the model's `step` has.
    `assignments` has one for each layer, whose routers run where there are some. `tables` are what selections leave to
    be counted: those of the acting lane, or of each silent one. `observed` is the schedule under which layers select
    beside the model and are routed as ever; None if they act. `outcome` is how the forward is counted; None until it
    comes to the model, as in a graph's replay. `calls` are those of the policy in force.
    """

    def __init__(self, assignments: Sequence[Assignment] = (), key: StepKey | None = None) -> None:
        self.key = key
        self.step: Step | None = None
        self.outcome: str | None = None
        self.observed: Schedule | None = None
        self.tables: list[Tables] = []
        self.calls: Calls = {}
        self.made: Offer | None = None
        """The alignment that a layer has made, until its ids are finished."""
        self._assign(assignments)
        self.is_running = bool(assignments)
        """Whether the target model's forward runs, in which layers route."""

    def begin(
        self,
        step: Step | None,
        outcome: str,
        tables: list[Tables],
        assignments: Sequence[Assignment],
        in_force: InForce,
    ) -> None:
        """Begin the model's forward, in which layers have these assignments under the active policy."""
        self.step, self.outcome, self.tables = step, outcome, tables
        self.observed = in_force.schedule if in_force.observes else None
        self.calls = in_force.calls
        self._assign(assignments)
        self.is_running = True

    def _assign(self, assignments: Sequence[Assignment]) -> None:
        self.assignments = assignments
        self.selections: list[Selection | None] = [None] * len(assignments)

    def check(self, layer_ids: Sequence[int]) -> bool:
        """Return whether some layer has selected. Raises `PolicyBypassed` if one that has a plan has not."""
        pairs = list(zip(self.assignments, self.selections, layer_ids, strict=True))
        missed = [number for assignment, chosen, number in pairs if assignment.plan is not None and chosen is None]
        if missed:
            phase = self.step.phase if self.step is not None else "prefill"
            raise PolicyBypassed(f"MoE layers {missed} did not route through the expert policy in a {phase} step")
        return any(chosen is not None for chosen in self.selections)


class Slot:
    """Where a stage has the forward at hand, and its layers find it. `counters` count routers outside of one."""

    def __init__(self, counters: Counters | None = None) -> None:
        self.frame: Frame | None = None
        self.counters = counters
