"""The captured CUDA graphs: the plan that each of them launches, and the numbers that its next replay reads."""

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
    """A switch's changes of graphs: the plans to write to buffers, and by reason the graphs that cannot follow."""

    writes: list[tuple[StepKey, Budgets, SelectionPlan]]
    misfits: dict[str, set[StepKey]]


class Graphs:
    """The decode and verify graphs of a server, each by its key; empty on a server that captures none.

    A captured layer launches the kernel of its plan at the capture, or nothing. Each layer and size has a buffer of its
    own for the plan's numbers, to which a switch writes.
    """

    def __init__(self, lost: bool = False) -> None:
        self.lost = lost
        """True if a capture has failed and no other has followed: the server runs without its graphs."""
        self.captured: dict[StepKey, dict[Layer, Assignment]] = {}
        """The plan that each layer of each graph launches."""
        self.stale: frozenset[StepKey] = frozenset()
        """The graphs that are not replayed because they cannot follow the active policy.

        Only a switch to vanilla leaves such graphs: any other captures again or is refused.
        """
        self._lanes: Sequence[Lane] = ()
        """The silent lanes that the graphs count for."""
        self._prepared: dict[StepKey, list[Assignment]] = {}
        """The assignments, with buffers, that the next capture of each key records."""
        self._found: dict[StepKey, StepKey] = {}
        """What `find_key` has returned since the last capture."""

    @property
    def rows(self) -> list[int]:
        """The captured batch sizes, in rows."""
        return sorted({key.rows for key in self.captured})

    @property
    def selecting(self) -> list[int]:
        """The captured batch sizes whose graphs select in some layer."""
        return sorted({key.rows for key, layers in self.captured.items() if any(kept.plan for kept in layers.values())})

    @property
    def by_depth(self) -> bool:
        """True if a captured plan reads the depth of drafts: a step that is captured again then reads the depth too."""
        return any(kept.plan and kept.plan.by_depth for layers in self.captured.values() for kept in layers.values())

    def find_key(self, key: StepKey) -> StepKey:
        """Return the key of the smallest graph that takes a step of this key, or `key` if no graph does."""
        if key not in self._found:
            alike = (graph for graph in self.captured if graph._replace(rows=key.rows) == key)
            self._found[key] = min((graph for graph in alike if graph.rows >= key.rows), default=key)
        return self._found[key]

    def prepare(self, layers: Sequence[Layer], step: Step, model_forward: ModelForward) -> None:
        """Make the buffers for a graph of this size in the eager step before its capture: a capture cannot copy."""
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

    def assign_for_capture(self, key: StepKey, in_force: InForce) -> list[Assignment]:
        """Return the assignment of each layer in a step that is being captured, with a buffer if its kernel reads one.

        A step that SGLang captures again (a weight update with `recapture_cuda_graph`) keeps its first plan, and its
        buffer has the active plan's numbers. Captured with the active plan, its kernel might lack steps of the first
        plan, and no switch could go back to that. The kernel of the first plan has run before, so a capture may launch
        it. A stale graph is captured for the active policy.
        """
        self._lanes, self.lost = in_force.lanes, False
        if key not in self.captured or key in self.stale:
            found = self._prepared.pop(key, None) or in_force.assign(key)
            self.captured[key] = dict(zip(in_force.layers, found, strict=True))
            self._found.clear()
            self.stale -= {key}
        return list(self.captured[key].values())

    def find_changes(self, in_force: InForce) -> Changes:
        """Return what a switch to a policy changes in the graphs."""
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
        """Write the numbers of the next replay of each graph; graphs that cannot follow become stale."""
        self.stale = frozenset[StepKey]().union(*changes.misfits.values())
        for key, budgets, plan in changes.writes:
            if key not in self.stale:
                budgets.write(plan)
        self._prepared.clear()  # these buffers have the former plans' numbers

    def weigh(self, in_force: InForce, acceptance: float) -> None:
        """Write an estimate of acceptance for the graphs whose plan reads an estimate.

        The writes are ordered by the current stream, and the host does not wait. A graph without a buffer keeps the
        number that it was captured with.
        """
        self._prepared.clear()  # these buffers have the former estimate
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
        """Return (buffer, plan to write to it) for a captured layer and step; None if there is nothing to write.

        Raises ValueError if the graph cannot follow.
        """
        # Checked before whether the step fits, because lanes also count in graphs that are not replayed now.
        if list(in_force.lanes) != list(self._lanes):
            raise ValueError("each plan of observe has counters in the graphs")
        found = in_force.find(layer, key)
        if in_force.observes or not found.fits:
            return None  # the same lanes need no numbers, and a step that does not fit is not replayed (`allows_graph`)
        then = found.plan
        # VANILLA and no plan both become `open_up`'s plan: each row's own top-k, with padding masked. A size that was
        # captured without a selection has no padding.
        changes = None if then is VANILLA else then
        if captured.plan is None:
            if changes is not None:
                raise ValueError("captured without a selection")
            return None
        if captured.buffer is None:
            if then == captured.plan or (then is not None and then.is_another_estimate(captured.plan)):
                return None
            raise ValueError("no kernel reads the numbers of their plan")
        plan = changes or open_up(captured.buffer.plan, layer.router)
        captured.buffer.check(plan)
        return captured.buffer, plan


def describe_misfits(misfits: dict[str, set[StepKey]]) -> str:
    """Return one line: why graphs would have to be captured again, and why a switch does not capture them."""
    reasons = [
        (f"graphs of {', '.join(map(str, sorted({key.rows for key in keys})))} rows: " if keys else "") + reason
        for reason, keys in misfits.items()
    ]
    return f'CUDA graphs would have to be captured again ({"; ".join(reasons)}): "recapture" is false'
