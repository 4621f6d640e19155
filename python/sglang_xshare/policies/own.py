"""What no paper has: a free plan, and what other policies would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..keys import Key
from ..plan import SelectionPlan
from .baselines import VANILLA
from .registry import register

# The algebra's own keys, so that a new idea needs no code.
register("custom", "any", summary="A plan by the algebra's own keys.")(SelectionPlan)


@register(
    "observe",
    "this project",
    own_keys={"plans": Key(list, "the policies to compare, each with its keys as --expert-policy spells it")},
    selects=False,
)
def observe(plans: Sequence[str | Mapping[str, Any]] = ("xshare", "oea")) -> SelectionPlan:
    """The model's own routing, untouched; counts what other policies would have chosen in its place."""
    return VANILLA
