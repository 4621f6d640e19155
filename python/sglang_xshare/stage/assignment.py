"""What every layer is to do in a forward: decided here, from the plans in force and from what graphs have captured."""

from __future__ import annotations

from collections.abc import Sequence

from .graphs import Graphs
from .layer import Assignment, Layer
from .plans import Plans
from .step import Step


class PolicyBypassed(RuntimeError):
    """A step under policy in which some MoE layer did not select. The server stops rather than go on without its
    policy.
    """


def assign(
    layers: Sequence[Layer], steps: Sequence[Step | None], plans: Plans, graphs: Graphs, is_captured: bool
) -> set[str | None]:
    """Hand every layer its assignment for the step that it sees, and return why layers have no plan, None where one has
    one; nothing where there is no step.

    An eager step selects as the plans in force say, by their own numbers; one that is being captured as in the first
    capture of its size.
    """
    reasons: set[str | None] = set()
    for layer, step in zip(layers, steps, strict=True):
        layer.assignment, layer.selection = Assignment(), None
        if step is None:
            continue
        plan, against = plans.find(layer, step.key)
        layer.assignment = Assignment(plan, step, fits=plans.fit(layer, step.key))
        if is_captured:
            layer.assignment = graphs.keep(layer, step.key, layer.assignment)
        reasons.add(None if layer.assignment.plan is not None else against)
    return reasons


def check_selected(layers: Sequence[Layer], step: Step) -> None:
    """Raise `PolicyBypassed` where a layer with a plan has not selected in a step that is over."""
    missed = [layer.layer_id for layer in layers if layer.assignment.plan is not None and layer.selection is None]
    if missed:
        raise PolicyBypassed(f"MoE layers {missed} did not route through the expert policy in a {step.phase} step")
