"""What captured CUDA graphs have frozen of a plan, and what of it is data that the next replay reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..plan import SelectionPlan
from ..policies import VANILLA
from ..types import Router
from .layer import Layer
from .plans import Plans
from .step import Size, Step

if TYPE_CHECKING:
    from ..selection.triton_kernel.budgets import Budgets

Place = tuple[Layer, Size]
"""A layer in a captured step."""


class Graphs:
    """The graphs captured for `rows` router rows, none on a server that captures none.

    A captured layer launches what its plan asked for then: a kernel of these steps of the algebra, or nothing. The
    plan's numbers lie in a buffer of its own for each layer and size, so that a switch writes them.
    """

    def __init__(self, rows: Sequence[int] = ()) -> None:
        self.rows = tuple(rows)
        self._captured: dict[Place, SelectionPlan | None] = {}
        self._sizes: dict[tuple[str, int], set[int]] = {}
        self._budgets: dict[Place, Budgets] = {}

    @property
    def selecting(self) -> list[int]:
        """The sizes whose graphs select in some layer."""
        return sorted({size.rows for (_, size), plan in self._captured.items() if plan is not None})

    @property
    def captures(self) -> bool:
        """Whether the server has graphs, also where their sizes are not known beforehand."""
        return bool(self.rows or self._captured)

    def find_size(self, size: Size) -> Size:
        """That of the smallest graph that takes a step of this size, which stays where no graph does."""
        captured = self._sizes.get((size.phase, size.tokens_per_request), ())
        return size._replace(rows=min((rows for rows in captured if rows >= size.rows), default=size.rows))

    def keep_captured(self, layer: Layer, size: Size, plan: SelectionPlan | None) -> SelectionPlan | None:
        """Remember what a layer does in a step that is being captured, and return it.

        A step that SGLang captures anew (a weight update with `recapture_cuda_graph`) does what it did the first time:
        the plan in force, whose numbers its buffer holds, may have steps of the algebra less, and a kernel without them
        could not follow back. What it launches has run before, so that a capture may begin with it.
        """
        self._sizes.setdefault((size.phase, size.tokens_per_request), set()).add(size.rows)
        return self._captured.setdefault((layer, size), plan)

    def borrow_buffer(self, layer: Layer, step: Step, plan: SelectionPlan, logits: torch.Tensor) -> Budgets | None:
        """The buffer that a layer's selection in this step reads its numbers from; None where the plan's own will do,
        because no graph has this size or no kernel takes the plan.

        It is made in the run that SGLang makes of each size before the capture, during which no copy could be made.
        """
        if step.rows not in self.rows:
            return None
        from ..selection.triton_kernel import supports
        from ..selection.triton_kernel.budgets import Budgets

        if not supports(plan, layer.router, step.batch, *logits.shape):
            return None
        place = layer, step.size
        if place not in self._budgets:
            self._budgets[place] = Budgets(plan, logits.device)
        return self._budgets[place]

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
        """Have every graph select by other plans from its next replay on, once `check` has passed and while no step
        runs.
        """
        for target in [self._fit(place, former, plans) for place in self._captured]:
            if target is not None:
                budgets, plan = target
                budgets.write(plan)
        # What an eager step of some size left is made anew for the plans to come.
        self._budgets = {place: budgets for place, budgets in self._budgets.items() if place in self._captured}

    def _fit(self, place: Place, former: Plans, plans: Plans) -> tuple[Budgets, SelectionPlan] | None:
        """(a buffer, the plan to write to it) for a captured layer and step to follow; None where nothing is to do.
        Raises ValueError where it cannot.
        """
        captured, budgets = self._captured[place], self._budgets.get(place)
        if not plans.fit(*place):
            return None  # it is not replayed, see `Stage.allows_graph`
        then = plans.find(*place)[0]
        if _is_observing(former) or _is_observing(plans):
            if former.given == plans.given:
                return None
            raise ValueError("observe counts what the graphs have captured")
        # Vanilla masks padding, which a selection of every row's own does too; without one there is no padding.
        routes_as_ever = then is None or then is VANILLA
        if captured is None:
            if not routes_as_ever:
                raise ValueError("they were captured without a selection")
            return None
        if budgets is None:
            if then == captured:
                return None
            raise ValueError("the plan they were captured with is part of them")
        plan = open_up(budgets.plan, place[0].router) if then is None or then is VANILLA else then
        budgets.check(plan)
        return budgets, plan


def open_up(plan: SelectionPlan, router: Router) -> SelectionPlan:
    """The plan under whose numbers a kernel made for `plan` routes every row as the model does. Raises ValueError for
    one with other columns than the model's top-k.
    """
    if plan.columns(router) != router.top_k:
        raise ValueError(f"kmax = {plan.kmax} columns; the model's own routing has {router.top_k}")
    return replace(plan, k0=None, p=1.0, beta=None)


def _is_observing(plans: Plans) -> bool:
    return plans.schedule is not None and bool(plans.schedule.observed)
