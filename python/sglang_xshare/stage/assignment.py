"""What every layer is to do in a forward: decided here, from the plans in force and from what graphs have captured."""

from collections.abc import Sequence

from .graphs import Graphs
from .layer import Assignment, Layer
from .plans import Plans
from .step import Step, make_plain


class PolicyBypassed(RuntimeError):
    """A step under policy in which some MoE layer did not select: the server stops."""


def assign(
    layers: Sequence[Layer], steps: Sequence[Step | None], plans: Plans, graphs: Graphs, is_captured: bool
) -> set[str | None]:
    """Hand every layer its assignment for the step that it sees, and return why layers have no plan, None where one has
    one; nothing where there is no step.

    An eager step selects as the plans in force say, by their own numbers; one that is being captured as in the first
    capture of its size. What layers do in a plain step, `make_plain`'s, is decided once for its key.
    """
    first = steps[0]
    key = None if first is None or is_captured or first is not make_plain(first.key) else first.key
    known = None if key is None else plans.assigned.get(key)
    if known is None:
        pairs = zip(layers, steps, strict=True)
        known = [_assign_one(layer, step, plans, graphs, is_captured) for layer, step in pairs]
        if key is not None:
            plans.assigned[key] = known
    for layer, (assignment, _) in zip(layers, known, strict=True):
        layer.assignment, layer.selection = assignment, None
    return set() if first is None else {reason for _, reason in known}


def _assign_one(
    layer: Layer, step: Step | None, plans: Plans, graphs: Graphs, is_captured: bool
) -> tuple[Assignment, str | None]:
    """(a layer's assignment, why it has no plan)."""
    if step is None:
        return Assignment(), None
    plan, against = plans.find(layer, step.key)
    assignment = Assignment(plan, step, fits=plans.fit(layer, step.key))
    if is_captured:
        assignment = graphs.keep(layer, step.key, assignment)
    return assignment, None if assignment.plan is not None else against


def check_selected(layers: Sequence[Layer], step: Step) -> None:
    """Raise `PolicyBypassed` where a layer with a plan has not selected in a step that is over."""
    missed = [layer.layer_id for layer in layers if layer.assignment.plan is not None and layer.selection is None]
    if missed:
        raise PolicyBypassed(f"MoE layers {missed} did not route through the expert policy in a {step.phase} step")
