"""The state of one forward, with the assignment and the selection of each MoE layer."""

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
    """An error that stops the server: an MoE layer with a plan did not select experts in a step."""


@dataclass(frozen=True)
class Assignment:
    """The instructions for one MoE layer, which are the same in all forwards with the same `StepKey`.

    - `plan`: the plan by which the layer selects experts. If it is None, the layer routes as the model does.
    - `reason`: the reason why the layer has no plan. In a prefill both `plan` and `reason` are None.
    - `buffer`: the buffer from which a captured graph reads the plan's numbers. A switch writes new numbers to it.
    - `fits`: True if the layer cannot have more active experts than page slots, or if experts are not paged.
    - `observed`: the plans that `observe` compares, one for each observed lane.
    """

    plan: SelectionPlan | None = None
    reason: str | None = None
    buffer: Budgets | None = None
    fits: bool = False
    observed: tuple[SelectionPlan, ...] = ()


@dataclass(eq=False)
class ModelForward:
    """A running forward of the target model.

    - `step`: the step of the forward, or None in a prefill.
    - `assignments`: the assignment of each MoE layer.
    - `selections`: the selection of each MoE layer, or None for a layer that has no plan or has not run yet.
    - `tallies`: the tally of the acting lane. Under `observe`, the tally of each observed lane instead.
    - `residents`: the loaded experts if experts are paged, else None.
    - `offer`: the last alignment that an MoE layer has offered to its runner.
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
        """Return the step's batch. If experts are paged, it contains the loaded experts of the layer at `index`."""
        assert self.step is not None
        if self.residents is None:
            return self.step.batch
        return replace(self.step.batch, resident=self.residents.loaded[index], slots=self.residents.slots or None)

    @property
    def has_selected(self) -> bool:
        """True if any layer has selected experts."""
        return any(chosen is not None for chosen in self.selections)

    def check(self, layer_ids: Sequence[int]) -> None:
        """Raise `PolicyBypassed` if a layer with a plan has not selected experts."""
        pairs = zip(self.assignments, self.selections, layer_ids, strict=True)
        missed = [layer_id for assignment, chosen, layer_id in pairs if assignment.plan is not None and chosen is None]
        if missed:
            phase = "prefill" if self.step is None else self.step.phase
            raise PolicyBypassed(f"MoE layers {missed} did not route through the expert policy in a {phase} step")


@dataclass(eq=False)
class Frame:
    """A running forward of the model runner.

    When SGLang captures CUDA graphs or warms up, it calls the model without the runner. A frame then describes only
    this forward of the model.

    `key` is the key of the runner's batch. It is None if the forward is neither a decode nor a verify step. The
    executed step may have more rows than `key`, because SGLang pads a batch to a captured size, or to the same number
    of rows on all attention ranks.

    `outcome` is the name under which the forward is counted, such as "policy" or "prefill". It is None until the
    model's forward begins. It stays None in a graph replay, because a replay does not call the model's forward. It is
    "no_context" if a layer routes outside of the model's forward.

    `model_forward` is set while the model's forward runs.
    """

    key: StepKey | None = None
    outcome: str | None = None
    model_forward: ModelForward | None = None


class CurrentFrame:
    """A reference to the current frame. A stage and all of its layers share this object.

    `wrap_runner` sets and clears the frame of the model runner. `Stage.run` does so if only the model runs.
    """

    frame: Frame | None = None

    @property
    def model_forward(self) -> ModelForward | None:
        """The running forward of the model, or None if the model does not run."""
        return None if self.frame is None else self.frame.model_forward
