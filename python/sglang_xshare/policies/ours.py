"""Policies of this project: `custom` takes any keys, and `observe` compares policies on a server's own traffic."""

from collections.abc import Mapping, Sequence
from typing import Any

from .baselines import VANILLA
from .keys import Key
from .plan import SelectionPlan
from .registry import register

HELP = "the policies to compare, each with its keys as --expert-policy spells it"
WORDS = 'a list of policies such as ["xshare:k0=1,add=24", "oea:k0=3"]'

register("custom", "any", summary="Any combination of the keys of a plan.")(SelectionPlan)


@register("observe", "this project", own_keys={"plans": Key(list, HELP, words=WORDS)}, selects=False)
def observe(plans: Sequence[str | Mapping[str, Any]] = ("xshare", "oea")) -> SelectionPlan:
    """Route as the model does, and count what other policies would choose."""
    return VANILLA
