"""What every layer is to do in a forward: decided here, from the plans in force and from what graphs have captured."""

from __future__ import annotations

from .graphs import Graphs
from .layer import Assignment, Layer
from .plans import Plans
from .step import Step


def assign(
    layer: Layer, step: Step | None, plans: Plans, graphs: Graphs, is_captured: bool
) -> tuple[Assignment, str | None]:
    """(what a layer does in this step, why it has no plan): in an eager step what the plans in force say, by their own
    numbers; in one that is being captured what it did in the first capture of this size.
    """
    if step is None:
        return Assignment(), None
    plan, against = plans.find(layer, step.size)
    assignment = Assignment(plan, step, fits=plans.fit(layer, step.size))
    if is_captured:
        assignment = graphs.keep(layer, step.size, assignment)
    return assignment, None if assignment.plan is not None else against
