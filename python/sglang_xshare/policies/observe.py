"""What other policies would do: the first thing to run on traffic of one's own."""

from collections.abc import Mapping, Sequence
from typing import Any

from .baselines import VANILLA
from .keys import Key
from .plan import SelectionPlan
from .registry import register

PLANS = ("xshare", "oea")


@register(
    "observe",
    "this project",
    own_keys={"plans": Key(list, "the policies to compare, each with its keys as --expert-policy spells it")},
    selects=False,
)
def observe(plans: Sequence[str | Mapping[str, Any]] = PLANS) -> SelectionPlan:
    """The model's own routing, untouched; counts what other policies would have chosen in its place."""
    return VANILLA
