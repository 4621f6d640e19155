"""What other policies would do: the first thing to run on traffic of one's own."""

from collections.abc import Mapping, Sequence
from typing import Any

from .baselines import VANILLA
from .keys import Key
from .plan import SelectionPlan
from .registry import register

HELP = "the policies to compare, each with its keys as --expert-policy spells it"
WORDS = 'a list of policies such as ["xshare:k0=1,add=24", "oea:k0=3"]'


@register("observe", "this project", own_keys={"plans": Key(list, HELP, words=WORDS)}, selects=False)
def observe(plans: Sequence[str | Mapping[str, Any]] = ("xshare", "oea")) -> SelectionPlan:
    """The model's own routing, untouched; counts what other policies would have chosen in its place."""
    return VANILLA
