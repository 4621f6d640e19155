"""One forward of the model runner: what its layers are to do, and what they have selected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..types import Selection
from .evidence.counters import Counters, Tables
from .step import Step

if TYPE_CHECKING:
    from ..policies.plan import SelectionPlan
    from ..policies.schedule import Schedule
    from ..selection.cpu_call import Call
    from ..selection.triton_kernel.budgets import Budgets
    from .handover import Offer

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

    `assignments` has one for each layer, whose routers run where there are some. `tables` are what selections leave to
    be counted: those of the acting lane, or of each silent one. `observed` is the schedule under which layers select
    beside the model and are routed as ever; None if they act. `outcome` is how the forward is counted; None until it
    comes to the model, as in a graph's replay. `calls` are those of the policy in force.
    """

    # Of the class, since most forwards replay a graph and set none of them: an instance costs 0.1 us so.
    step: Step | None = None
    outcome: str | None = None
    observed: Schedule | None = None
    tables: Sequence[Tables] = ()
    calls: Calls | None = None
    assignments: Sequence[Assignment] = ()
    selections: list[Selection | None]
    """What each layer has chosen; None before, and where it has no plan."""
    made: Offer | None = None
    """The alignment that a layer has made, until its ids are finished."""
    is_running = False
    """Whether the target model's forward runs, in which layers route."""

    def __init__(self, assignments: Sequence[Assignment] = ()) -> None:
        if assignments:
            self.assign(assignments)
            self.is_running = True

    def begin(self, step: Step | None, outcome: str, tables: Sequence[Tables], calls: Calls) -> None:
        """The forward comes to the model, where it is counted as this outcome."""
        self.step, self.outcome, self.tables, self.calls = step, outcome, tables, calls
        self.is_running = True

    def assign(self, assignments: Sequence[Assignment]) -> None:
        """Hand every layer its assignment; none has selected."""
        self.assignments = assignments
        self.selections = [None] * len(assignments)

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
