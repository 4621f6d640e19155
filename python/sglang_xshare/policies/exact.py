"""What makes a request exact: what it says itself, and what the policy in force says of those that say nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .keys import as_json

KEY = "expert_policy"
"""Of `custom_params` in a request's sampling parameters."""
EXACT, SHARED = "exact", "shared"
NAMESPACE = "expert_policy=exact"
"""What keeps the cached prefixes of exact requests apart, as part of SGLang's `extra_key`."""
ALLOWED = 'an object such as {"priority": 10} or {"default": true}'


@dataclass(frozen=True)
class Rule:
    """Which requests are exact that do not say it: those of at least a `priority`, or all by `default`."""

    priority: int | None = None
    default: bool = False


def read_rule(value: Any) -> Rule:
    """The policy's key `exact`. Raises ValueError naming what is allowed."""
    wrong = not isinstance(value, Mapping) or not value or bool(value.keys() - {"priority", "default"})
    if wrong or type(value.get("priority", 0)) is not int or type(value.get("default", False)) is not bool:
        raise ValueError(f"exact = {as_json(value)}: allowed is {ALLOWED}")
    return Rule(**value)


def is_exact(custom_params: Any, priority: int | None, rule: Rule, low_first: bool = False) -> bool:
    """Whether a request with these `custom_params` is exact. With `low_first` a lower priority is the higher one; one
    without a priority has the least. A value that a front end let pass unchecked is taken for exact.
    """
    said = custom_params.get(KEY) if isinstance(custom_params, Mapping) else None
    if said is not None:
        return bool(said != SHARED)
    if rule.default or rule.priority is None or priority is None:
        return rule.default
    return priority <= rule.priority if low_first else priority >= rule.priority


def check_said(value: Any) -> None:
    """Raise ValueError in one line for what a request may not say."""
    if value not in (None, EXACT, SHARED):
        raise ValueError(f"custom_params.{KEY} = {as_json(value)}: allowed is {EXACT!r} or {SHARED!r}")
