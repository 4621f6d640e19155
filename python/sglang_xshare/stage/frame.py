"""One forward of the model runner: each layer's assignment, and what each layer has selected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..policies.plan import SelectionPlan
from ..types import Batch, Selection
from ..upstream.paging import Residents
from .record.counters import StepTally
from .step import Step, StepKey

if TYPE_CHECKING:
    from ..selection.triton_kernel.budgets import Budgets
    from .handover import Offer


class PolicyBypassed(RuntimeError):
    """An error that stops the server: an MoE layer with a plan has not selected in a step."""


@dataclass(frozen=True)
class Assignment:
    """The task of one layer in all forwards with the same `StepKey`.

    The layer selects by `plan`, or routes as the model does, for `reason`. Both are None in a prefill.

    A captured graph reads the plan's numbers from `buffer`, to which a switch writes. `fits` is True if the layer's
    page slots hold all active experts for all logits, and for a layer whose experts are not paged. `observed` are the
    plans that `observe` compares, one for each observed lane.
    """

    plan: SelectionPlan | None = None
    reason: str | None = None
    buffer: Budgets | None = None
    fits: bool = False
    observed: tuple[SelectionPlan, ...] = ()


@dataclass(eq=False)
class ModelForward:
    """A running forward of the target model, in which layers route.

    `step` is None in a prefill. `assignments` and `selections` have one entry for each layer. A layer's selection is
    None without a plan, and until the layer selects. `tallies` collect the counts of the selections: one tally for the
    acting lane, or under `observe` one for each observed lane. `residents` has the loaded experts, if experts are
    paged. `offer` is the alignment that the last layer offers its runner.
    """

    step: Step | None
    assignments: Sequence[Assignment]
    tallies: Sequence[StepTally] = ()
    residents: Residents | None = None
    selections: list[Selection | None] = field(init=False)
    offer: Offer | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.selections = [None] * len(self.assignments)

    def find_batch(self, index: int) -> Batch:
        """Return the step's batch, with the loaded experts of the layer at `index` if experts are paged."""
        assert self.step is not None
        if self.residents is None:
            return self.step.batch
        return replace(self.step.batch, resident=self.residents.loaded[index], slots=self.residents.slots or None)

    def check(self, layer_ids: Sequence[int]) -> bool:
        """Return whether some layer has selected. Raises `PolicyBypassed` if a layer with a plan has not selected."""
        pairs = zip(self.assignments, self.selections, layer_ids, strict=True)
        missed = [layer_id for assignment, chosen, layer_id in pairs if assignment.plan is not None and chosen is None]
        if missed:
            phase = "prefill" if self.step is None else self.step.phase
            raise PolicyBypassed(f"MoE layers {missed} did not route through the expert policy in a {phase} step")
        return any(chosen is not None for chosen in self.selections)


@dataclass(eq=False)
class Frame:
    """One forward of the model runner, or of the model alone in a capture and in a warm-up of SGLang.

    `key` is the key of the runner's batch; None if the forward is neither decode nor verify. The step that the model or
    a graph then runs may have more rows: SGLang pads the batch to equal rows on all attention ranks, or to a captured
    size. `outcome` is the name under which the forward is counted: None before the model's forward, and in a graph's
    replay, which does not run the model's forward; "no_context" if a layer routes outside of the model's forward.
    `model_forward` is set while the model's forward runs.
    """

    key: StepKey | None = None
    outcome: str | None = None
    model_forward: ModelForward | None = None


class CurrentFrame:
    """A holder of the current frame, which a stage and its layers share."""

    frame: Frame | None = None

    @property
    def model_forward(self) -> ModelForward | None:
        """The model's forward; None outside of it."""
        return None if self.frame is None else self.frame.model_forward
