"""One forward of the model runner: each layer's assignment, and what each layer has selected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from ..types import Selection
from .record.counters import Counters, Tables
from .step import Step, StepKey

if TYPE_CHECKING:
    from ..policies.plan import SelectionPlan
    from ..policies.schedule import Schedule
    from ..selection.cpu_call import Call
    from ..selection.triton_kernel.budgets import Budgets

Calls: TypeAlias = "dict[tuple[object, ...], tuple[SelectionPlan, Call | None]]"
"""Compiled calls on a CPU, by layer, plan and shape of a step."""


class PolicyBypassed(RuntimeError):
    """A step under policy in which some MoE layer did not select: the server stops."""


@dataclass(frozen=True)
class Assignment:
    """A layer's part in one forward. Without a `plan` the model routes; without a `step` the forward is no step. A
    captured graph reads the plan's numbers from `buffer`, to which a switch writes. `fits` says that the active experts
    fit the layer's slots for all logits.
    """

    plan: SelectionPlan | None = None
    step: Step | None = None
    buffer: Budgets | None = None
    fits: bool = False


class Frame:
    """One forward of the model runner, from its begin to its end, with all that is known of the forward.

    `key` is that of the runner's batch, None if the forward is no step. The model's `step` may have more rows: SGLang
    pads the batch for attention ranks and for a capture. `assignments` has one entry for each layer. `tables` collect
    the counts of the selections: one table for the acting lane, or one for each silent lane. `observed` is the schedule
    of `observe`, under which the model routes, and None if the policy acts. `outcome` names how the forward is counted;
    a graph's replay, which does not run the model's forward, leaves `outcome` None. `calls` are the active policy's.
    """

    # Of the class, because most forwards replay a graph and set few of them: an instance takes 0.1 us.
    key: StepKey | None = None
    step: Step | None = None
    outcome: str | None = None
    observed: Schedule | None = None
    tables: Sequence[Tables] = ()
    calls: Calls | None = None
    assignments: Sequence[Assignment] = ()
    selections: list[Selection | None]
    """Each layer's selection; None before the layer selects, and without a plan."""
    is_running = False
    """True while the target model's forward runs, in which layers route."""

    def begin(self, assignments: Sequence[Assignment]) -> Frame:
        """Begin the model's forward, in which layers have these assignments. Return the frame."""
        self.assignments, self.selections = assignments, [None] * len(assignments)
        self.is_running = True
        return self

    def check(self, layer_ids: Sequence[int]) -> bool:
        """Return whether some layer has selected. Raises `PolicyBypassed` if a layer with a plan has not selected."""
        pairs = list(zip(self.assignments, self.selections, layer_ids, strict=True))
        missed = [number for assignment, chosen, number in pairs if assignment.plan is not None and chosen is None]
        if missed:
            phase = self.step.phase if self.step is not None else "prefill"
            raise PolicyBypassed(f"MoE layers {missed} did not route through the expert policy in a {phase} step")
        return any(chosen is not None for chosen in self.selections)


class Slot:
    """The place of the current frame, which a stage and its layers share. The stage's `counters` count the calls of
    layers without a frame.
    """

    frame: Frame | None = None
    counters: Counters | None = None
