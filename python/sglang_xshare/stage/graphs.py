"""What captured CUDA graphs have frozen of a plan, and what of it is data that the next replay reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..policies import VANILLA
from ..policies.plan import SelectionPlan
from ..types import Router
from .layer import Assignment, Layer
from .plans import Plans
from .step import Step, StepKey

if TYPE_CHECKING:
    from ..selection.triton_kernel.budgets import Budgets

Place = tuple[Layer, StepKey]
"""A layer in a captured step."""


class Graphs:
    """The graphs captured for `rows` router rows, none on a server that captures none.

    A captured layer launches what its plan asked for then: a kernel of these steps of the algebra, or nothing. The
    plan's numbers lie in a buffer of its own for each layer and size, so that a switch writes them.
    """

    def __init__(self, rows: Sequence[int] = ()) -> None:
        self.rows = tuple(rows)
        self._captured: dict[Place, Assignment] = {}
        self.by_depth = False
        """Whether a captured plan asks how deep drafts are: also a step that is captured anew then says it."""
        self._sizes: dict[tuple[str, int], set[int]] = {}
        self._buffers: dict[Place, Budgets] = {}
        """Those made for captures to come."""

    @property
    def selecting(self) -> list[int]:
        """The sizes whose graphs select in some layer."""
        return sorted({key.rows for (_, key), kept in self._captured.items() if kept.plan is not None})

    @property
    def captures(self) -> bool:
        """Whether the server has graphs, also where their sizes are not known beforehand."""
        return bool(self.rows or self._captured)

    def find_key(self, key: StepKey) -> StepKey:
        """That of the smallest graph that takes a step of this size, which stays where no graph does."""
        captured = self._sizes.get((key.phase, key.tokens_per_request), ())
        return key._replace(rows=min((rows for rows in captured if rows >= key.rows), default=key.rows))

    def prepare(self, layers: Sequence[Layer], step: Step) -> None:
        """Make the buffers for graphs of this size after the eager step before a capture, in which no copy can be."""
        if step.rows not in self.rows:
            return
        from ..selection.triton_kernel import supports
        from ..selection.triton_kernel.budgets import Budgets

        for layer in layers:
            place, plan, chosen = (layer, step.key), layer.assignment.plan, layer.selection
            if plan is None or chosen is None or place in self._captured or place in self._buffers:
                continue
            if supports(plan, layer.router, step.batch, step.rows, len(chosen.active)):
                self._buffers[place] = Budgets(plan, chosen.active.device)

    def keep(self, layer: Layer, key: StepKey, assignment: Assignment) -> Assignment:
        """Remember what a layer does in a step that is being captured, with a buffer where its kernel reads one, and
        return it.

        A step that SGLang captures anew (a weight update with `recapture_cuda_graph`) does what it did the first time:
        the plan in force, whose numbers its buffer holds, may have steps of the algebra less, and a kernel without them
        could not follow back. What it launches has run before, so that a capture may begin with it.
        """
        self._sizes.setdefault((key.phase, key.tokens_per_request), set()).add(key.rows)
        place = layer, key
        if place not in self._captured:
            self._captured[place] = replace(assignment, step=None, buffer=self._buffers.pop(place, None))
            self.by_depth |= assignment.plan is not None and assignment.plan.by_depth
        return replace(self._captured[place], step=assignment.step)

    def check(self, former: Plans, plans: Plans) -> None:
        """Raise ValueError in one line where some graph cannot follow from one schedule's plans to another's."""
        misfits: dict[str, set[int]] = {}
        for place in self._captured:
            try:
                self._fit(place, former, plans)
            except ValueError as error:
                misfits.setdefault(str(error), set()).add(place[1].rows)
        for reason, rows in misfits.items():
            sizes = ", ".join(map(str, sorted(rows)))
            raise ValueError(
                f"CUDA graphs of {sizes} rows would have to be captured anew: {reason}; a server started with this "
                "policy has them"
            )

    def follow(self, former: Plans, plans: Plans) -> None:
        """Have every graph select by other plans from its next replay on, once `check` has passed, between steps."""
        for target in [self._fit(place, former, plans) for place in self._captured]:
            if target is not None:
                budgets, plan = target
                budgets.write(plan)
        self._buffers.clear()  # what eager steps have left is made anew for the plans to come

    def weigh(self, plans: Plans, acceptance: float) -> None:
        """Have graphs whose plan asks for an estimate weigh drafts by it, in the order of the current stream, while the
        host waits for nothing. One without a buffer goes on as it was captured.
        """
        self._buffers.clear()  # made of the former number
        schedule, buffers = plans.schedule, []
        for (layer, key), kept in self._captured.items():
            plan = None if schedule is None else schedule.plan(layer.layer_id, key.rows)
            if kept.buffer is not None and plan is not None and plan.estimates:
                buffers.append(kept.buffer)
        if not buffers:
            return
        from ..selection.triton_kernel.budgets import encode_drafts

        drafts = encode_drafts(acceptance)
        if buffers[0].values.is_cuda:
            drafts = drafts.pin_memory()
        for buffer in buffers:
            buffer.weigh(drafts)

    def _fit(self, place: Place, former: Plans, plans: Plans) -> tuple[Budgets, SelectionPlan] | None:
        """(buffer, plan to write to it) for a captured layer and step; None if nothing is to do. Raises ValueError
        where it cannot follow.
        """
        # Before all else: what is observed is counted where graphs go on writing, though they are not replayed now.
        if _is_observing(former) or _is_observing(plans):
            if former.given == plans.given:
                return None
            raise ValueError("observe counts what the graphs have captured")
        if not plans.fit(*place):
            return None  # it is not replayed, see `Stage.allows_graph`
        captured, then = self._captured[place], plans.find(*place)[0]
        # Vanilla masks padding, which a selection of every row's own does too; without one there is no padding.
        routes_as_ever = then is None or then is VANILLA
        if captured.plan is None:
            if not routes_as_ever:
                raise ValueError("they were captured without a selection")
            return None
        if captured.buffer is None:
            if then == captured.plan or (then is not None and then.is_another_estimate(captured.plan)):
                return None
            raise ValueError("the plan they were captured with is part of them")
        plan = open_up(captured.buffer.plan, place[0].router) if then is None or then is VANILLA else then
        captured.buffer.check(plan)
        return captured.buffer, plan


def open_up(plan: SelectionPlan, router: Router) -> SelectionPlan:
    """The plan that has `plan`'s kernel route as the model does. Raises ValueError for other columns than top-k."""
    if plan.columns(router) != router.top_k:
        raise ValueError(f"kmax = {plan.kmax} columns; the model's own routing has {router.top_k}")
    return replace(plan, k0=None, p=1.0, beta=None, warm_rows=None)


def _is_observing(plans: Plans) -> bool:
    return plans.schedule is not None and bool(plans.schedule.observed)
