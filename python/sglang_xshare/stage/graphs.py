"""The captured CUDA graphs, their plans, and the buffers from which replays read numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..policies import VANILLA
from ..policies.bounds import open_up
from ..policies.plan import SelectionPlan
from .frame import Assignment, ModelForward
from .in_force import InForce
from .lane import Lane
from .layer import Layer
from .step import Step, StepKey

if TYPE_CHECKING:
    from ..selection.triton_kernel.budgets import Budgets


@dataclass(frozen=True)
class Changes:
    """The changes that a switch makes to the captured CUDA graphs.

    Each entry of `writes` contains the key of a graph, a buffer of this graph, and the plan to write to this buffer.
    `misfits` maps each reason to the graphs that cannot follow the new policy for this reason.
    """

    writes: list[tuple[StepKey, Budgets, SelectionPlan]]
    misfits: dict[str, set[StepKey]]


class Graphs:
    """The captured decode and verify graphs of a server. Each graph is found by its `StepKey`.

    A replay launches the kernels that were captured. If a layer had a plan at the capture, the graph contains the
    selection kernel of this plan. The kernel reads the plan's numbers, such as budgets and thresholds, from a buffer.
    Each layer of each graph has its own buffer. A switch writes the numbers of the new plan to this buffer.
    """

    def __init__(self, lost: bool = False) -> None:
        self._lost = lost
        self.captured: dict[StepKey, dict[Layer, Assignment]] = {}
        """The assignment that each layer had when a graph was captured. The outer key is the key of the graph."""
        self.stale: frozenset[StepKey] = frozenset()
        """The graphs that are not replayed, because they cannot follow the active policy.

        Only a switch to vanilla makes graphs stale. If graphs cannot follow another policy, the switch to this policy
        captures all graphs again or is refused.
        """
        self._lanes: Sequence[Lane] = ()
        """The observed lanes at the last capture. The graphs write to the counters of these lanes."""
        self._prepared: dict[StepKey, list[Assignment]] = {}
        """The assignments for the next capture of each graph, with new buffers. The key is the key of the graph."""
        self._found: dict[StepKey, StepKey] = {}
        """The results of `find_key` since the last capture."""

    @property
    def lost(self) -> bool:
        """True if the last capture has failed, so the server runs without graphs."""
        return self._lost and not self.captured

    @property
    def rows(self) -> list[int]:
        """The numbers of rows for which graphs were captured, in ascending order."""
        return sorted({key.rows for key in self.captured})

    @property
    def selecting(self) -> list[int]:
        """The numbers of rows of the graphs that select experts in some layer, in ascending order."""
        return sorted({key.rows for key, layers in self.captured.items() if any(kept.plan for kept in layers.values())})

    @property
    def by_depth(self) -> bool:
        """True if a captured plan reads the depth of draft tokens. A new capture must then read the depth too."""
        return any(kept.plan and kept.plan.by_depth for layers in self.captured.values() for kept in layers.values())

    def find_key(self, key: StepKey) -> StepKey:
        """Return the key of the smallest graph that can run a step with `key`, or `key` if there is no such graph."""
        if key not in self._found:
            alike = (graph for graph in self.captured if graph._replace(rows=key.rows) == key)
            self._found[key] = min((graph for graph in alike if graph.rows >= key.rows), default=key)
        return self._found[key]

    def prepare(self, layers: Sequence[Layer], step: Step, model_forward: ModelForward) -> None:
        """Create a graph's buffers in the eager step before its capture: a capture cannot copy from the host."""
        if step.key in self._prepared or (step.key in self.captured and step.key not in self.stale):
            return
        from ..selection.triton_kernel import supports
        from ..selection.triton_kernel.budgets import Budgets

        assignments = []
        for layer, found, chosen in zip(layers, model_forward.assignments, model_forward.selections, strict=True):
            plan, buffer = found.plan, None
            if plan is not None and chosen is not None:
                is_read = supports(plan, layer.router, step.batch, step.rows, len(chosen.active))
                buffer = Budgets(plan, chosen.active.device) if is_read else None
            assignments.append(replace(found, buffer=buffer))
        self._prepared[step.key] = assignments

    def begin_capture(self, key: StepKey, in_force: InForce) -> list[Assignment]:
        """Register the graph that is being captured, and return the assignment of each layer in its step.

        An assignment contains a buffer if the layer's kernel reads its numbers from a buffer.

        After a weight update with `recapture_cuda_graph`, SGLang captures the same graphs again. Each layer then keeps
        the kernel of its first plan, and the buffer contains the numbers of the active plan. A kernel for the active
        plan might lack code that the first plan needs, so a later switch back could be impossible. The kernel of the
        first plan is also compiled already, as a capture requires. A stale graph is captured with the active plans
        instead.
        """
        self._lanes = in_force.lanes
        if key not in self.captured or key in self.stale:
            found = self._prepared.pop(key, None) or in_force.assign(key)
            self.captured[key] = dict(zip(in_force.layers, found, strict=True))
            self._found.clear()
            self.stale -= {key}
        return list(self.captured[key].values())

    def find_changes(self, in_force: InForce) -> Changes:
        """Return the changes that a switch to the policy `in_force` would make to the graphs."""
        writes: list[tuple[StepKey, Budgets, SelectionPlan]] = []
        misfits: dict[str, set[StepKey]] = {}
        for key, layer, kept in self._places():
            try:
                target = self._find_target(layer, key, kept, in_force)
            except ValueError as error:
                misfits.setdefault(str(error), set()).add(key)
            else:
                writes += [] if target is None else [(key, *target)]
        return Changes(writes, misfits)

    def _places(self) -> Iterator[tuple[StepKey, Layer, Assignment]]:
        for key, layers in self.captured.items():
            for layer, kept in layers.items():
                yield key, layer, kept

    def follow(self, changes: Changes) -> None:
        """Write the numbers of the new plans to the buffers. Mark graphs that cannot follow the new policy as stale."""
        self.stale = frozenset[StepKey]().union(*changes.misfits.values())
        for key, budgets, plan in changes.writes:
            if key not in self.stale:
                budgets.write(plan)
        self._prepared.clear()  # these buffers contain the previous plans' numbers

    def weigh(self, in_force: InForce, acceptance: float) -> None:
        """Write the new acceptance estimate to the buffers of all plans that use the estimate.

        The writes run on the current stream, and the host does not wait for them. A layer without a buffer keeps the
        estimate with which it was captured.
        """
        self._prepared.clear()  # these buffers contain the previous estimate
        schedule, buffers = in_force.schedule, []
        for key, layer, kept in self._places():
            plan = schedule and schedule.plan(layer.layer_id, key.rows)
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

    def _find_target(
        self, layer: Layer, key: StepKey, captured: Assignment, in_force: InForce
    ) -> tuple[Budgets, SelectionPlan] | None:
        """Return a layer's buffer and the plan to write to this buffer, or None if there is nothing to write.

        Raises ValueError if the captured graph cannot follow the policy.
        """
        # This check comes first. A graph whose experts do not fit the page slots now may be replayed later, and would
        # then write to the counters of the previous lanes.
        if list(in_force.lanes) != list(self._lanes):
            raise ValueError("the plans that observe compares have changed since the capture")
        found = in_force.find(layer, key)
        if in_force.observes or not found.fits:
            # Under `observe`, no kernel reads a buffer. A step whose experts do not fit the page slots is never
            # replayed (see `allows_graph`).
            return None
        then = found.plan
        # For VANILLA, and for a layer without a plan, the kernel runs the plan of `open_up`. This plan keeps each row's
        # own top-k and masks padding rows.
        changes = None if then is VANILLA else then
        if captured.plan is None:
            if changes is not None:
                raise ValueError("captured without a selection")
            return None  # the graph routes as the model does, and its size has no padding to mask
        if captured.buffer is None:
            if then == captured.plan or (then is not None and then.is_another_estimate(captured.plan)):
                return None
            raise ValueError("the captured plan's numbers are fixed, because no buffer holds them")
        plan = changes or open_up(captured.buffer.plan, layer.router)
        captured.buffer.check(plan)
        return captured.buffer, plan


def describe_misfits(misfits: dict[str, set[StepKey]]) -> str:
    """Return one line: why graphs would have to be captured again, and that "recapture" is false."""
    reasons = [
        (f"graphs of {', '.join(map(str, sorted({key.rows for key in keys})))} rows: " if keys else "") + reason
        for reason, keys in misfits.items()
    ]
    return f'CUDA graphs would have to be captured again ({"; ".join(reasons)}): "recapture" is false'
