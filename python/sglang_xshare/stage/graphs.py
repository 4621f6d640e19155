"""What captured CUDA graphs have frozen of a plan, and what of it is data that the next replay reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..policies import VANILLA
from ..policies.plan import SelectionPlan
from ..types import Router
from .frame import Assignment, Frame
from .in_force import InForce
from .lane import Lane
from .layer import Layer
from .step import Step, StepKey, make_plain

if TYPE_CHECKING:
    from ..selection.triton_kernel.budgets import Budgets

Place = tuple[Layer, StepKey]
"""A layer in a captured step."""


class Graphs:
    """The decode and verify graphs of a server, none on one that captures none: each by its key, as it is captured.

    A captured layer launches what its plan asked for then: a kernel of these steps of the algebra, or nothing. The
    plan's numbers lie in a buffer of its own for each layer and size, so that a switch writes them.
    """

    def __init__(self) -> None:
        self._captured: dict[Place, Assignment] = {}
        self._lanes: Sequence[Lane] = ()
        """The silent lanes that the graphs count for."""
        self.by_depth = False
        """Whether a captured plan asks how deep drafts are: also a step that is captured anew then says it."""
        self.stale: frozenset[StepKey] = frozenset()
        """The graphs that cannot follow the policy in force, which is vanilla: none of them is replayed."""
        self._sizes: dict[tuple[str, int], set[int]] = {}
        """The captured rows by phase and tokens of a request."""
        self._buffers: dict[Place, Budgets] = {}
        """Those made for captures to come."""

    @property
    def rows(self) -> list[int]:
        """The sizes that are captured."""
        return sorted(set().union(*self._sizes.values()))

    @property
    def selecting(self) -> list[int]:
        """The sizes whose graphs select in some layer."""
        return sorted({key.rows for (_, key), kept in self._captured.items() if kept.plan is not None})

    def find_key(self, key: StepKey) -> StepKey:
        """That of the smallest graph that takes a step of this size, which stays where no graph does."""
        captured = self._sizes.get((key.phase, key.tokens_per_request), ())
        return key._replace(rows=min((rows for rows in captured if rows >= key.rows), default=key.rows))

    def prepare(self, layers: Sequence[Layer], frame: Frame, step: Step) -> None:
        """Make the buffers for a graph of this size in the eager step before its capture, in which no copy can be."""
        from ..selection.triton_kernel import supports
        from ..selection.triton_kernel.budgets import Budgets

        for layer, assignment, chosen in zip(layers, frame.assignments, frame.selections, strict=True):
            place, plan = (layer, step.key), assignment.plan
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
        place = layer, key
        if place not in self._captured:
            self._captured[place] = replace(assignment, step=None, buffer=self._buffers.pop(place, None))
            self.by_depth |= assignment.plan is not None and assignment.plan.by_depth
        return replace(self._captured[place], step=assignment.step)

    def begin(self, key: StepKey, lanes: Sequence[Lane]) -> None:
        """A step of this size is being captured. A graph that cannot follow is captured as the policy in force says."""
        self._lanes = lanes
        self._sizes.setdefault((key.phase, key.tokens_per_request), set()).add(key.rows)
        if key in self.stale:
            self._captured = {place: kept for place, kept in self._captured.items() if place[1] != key}
            self.stale -= {key}

    def find_misfits(self, in_force: InForce) -> dict[str, set[StepKey]]:
        """Return why graphs cannot follow a policy, and which; nothing if all can."""
        misfits: dict[str, set[StepKey]] = {}
        for place in self._captured:
            try:
                self._fit(place, in_force)
            except ValueError as error:
                misfits.setdefault(str(error), set()).add(place[1])
        return misfits

    def follow(self, in_force: InForce) -> None:
        """Have every graph select by another policy from its next replay on, between steps. One that cannot follow goes
        stale.
        """
        self.stale = frozenset[StepKey]().union(*self.find_misfits(in_force).values())
        for place in self._captured:
            if place[1] not in self.stale and (target := self._fit(place, in_force)) is not None:
                budgets, plan = target
                budgets.write(plan)
        self._buffers.clear()  # what eager steps have left is made anew for the plans to come

    def weigh(self, in_force: InForce, acceptance: float) -> None:
        """Have graphs whose plan asks for an estimate weigh drafts by it, in the order of the current stream, while the
        host waits for nothing. One without a buffer goes on as it was captured.
        """
        self._buffers.clear()  # made of the former number
        schedule, buffers = in_force.schedule, []
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

    def _fit(self, place: Place, in_force: InForce) -> tuple[Budgets, SelectionPlan] | None:
        """(buffer, plan to write to it) for a captured layer and step; None if nothing is to do. Raises ValueError
        where it cannot follow.
        """
        # Before all else: what is observed is counted where graphs go on writing, though they are not replayed now.
        if list(in_force.lanes) != list(self._lanes):
            raise ValueError("observe counts what the graphs have captured")
        if in_force.lanes or not in_force.fit(*place):
            return None  # of the same lanes all is as it was; what does not fit is not replayed, see `allows_graph`
        captured, then = self._captured[place], in_force.find(*place)[0]
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


def describe_misfits(misfits: dict[str, set[StepKey]], allows: bool) -> str:
    """Say in one line why graphs would have to be captured anew, and that a switch did not allow it, or cannot."""
    reasons = [
        (f"graphs of {', '.join(map(str, sorted({key.rows for key in keys})))} rows: " if keys else "") + reason
        for reason, keys in misfits.items()
    ]
    against = (
        "this server cannot do that; one that is started with this policy has them"
        if allows
        else '"recapture" is false'
    )
    return f"CUDA graphs would have to be captured anew ({'; '.join(reasons)}): {against}"


def open_up(plan: SelectionPlan, router: Router) -> SelectionPlan:
    """The plan that has `plan`'s kernel route as the model does. Raises ValueError for other columns than top-k."""
    if plan.columns(router) != router.top_k:
        raise ValueError(f"kmax = {plan.kmax} columns; the model's own routing has {router.top_k}")
    return replace(plan, k0=None, p=1.0, beta=None, warm_rows=None)


def assign(
    layers: Sequence[Layer], steps: Sequence[Step | None], in_force: InForce, graphs: Graphs, is_captured: bool
) -> tuple[list[Assignment], set[str | None]]:
    """Return every layer's assignment for the step that it sees, and why layers have no plan: None if one has one,
    nothing without a step.

    An eager step selects as the policy in force says, by its own numbers; one that is being captured as in the first
    capture of its size. What layers do in a plain step, `make_plain`'s, is decided once for its key.
    """
    first = steps[0]
    if first is not None and is_captured:
        graphs.begin(first.key, in_force.lanes)
    key = None if first is None or is_captured or first is not make_plain(first.key) else first.key
    known = None if key is None else in_force.assigned.get(key)
    if known is None:
        pairs = zip(layers, steps, strict=True)
        found = [_assign_one(layer, step, in_force, graphs, is_captured) for layer, step in pairs]
        reasons = set() if first is None else {reason for _, reason in found}
        known = [assignment for assignment, _ in found], reasons
        if key is not None:
            in_force.assigned[key] = known
    return known


def _assign_one(
    layer: Layer, step: Step | None, in_force: InForce, graphs: Graphs, is_captured: bool
) -> tuple[Assignment, str | None]:
    """(a layer's assignment, why it has no plan)."""
    if step is None:
        return Assignment(), None
    plan, against = in_force.find(layer, step.key)
    assignment = Assignment(plan, step, fits=in_force.fit(layer, step.key))
    if is_captured:
        assignment = graphs.keep(layer, step.key, assignment)
    return assignment, None if assignment.plan is not None else against
