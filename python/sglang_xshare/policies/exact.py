"""Exact requests: the choice of the request itself, and the active policy's default for requests without a choice."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .keys import MOST, as_json

KEY = "expert_policy"
"""The key of `custom_params` in a request's sampling parameters."""
EXACT, SHARED = "exact", "shared"
OURS = f"{KEY}="
"""The beginning of this project's part of an `extra_key` or of a routing key."""
NAMESPACE = OURS + EXACT
"""The part of SGLang's `extra_key` that separates the cached prefixes of exact requests from all others."""
ALLOWED = 'an object such as {"priority": 10} or {"default": true}'


@dataclass(frozen=True)
class Rule:
    """The default for requests that do not set `expert_policy`: exact from a `priority` on, or all with `default`."""

    priority: int | None = None
    default: bool = False

    @property
    def given(self) -> dict[str, Any]:
        """The rule as the policy's key `exact`; empty without a rule."""
        return {name: value for name, value in vars(self).items() if value is not None and value is not False}


def read_rule(value: Any) -> Rule:
    """Return the rule of the policy's key `exact`. Raises ValueError naming what is allowed."""
    wrong = not isinstance(value, Mapping) or not value or bool(value.keys() - {"priority", "default"})
    if wrong or type(value.get("priority", 0)) is not int or type(value.get("default", False)) is not bool:
        raise ValueError(f"exact = {as_json(value)}: must be {ALLOWED}")
    if abs(value.get("priority", 0)) > MOST:
        raise ValueError(f"exact = {as_json(value)}: priority must be from -{MOST} to {MOST}")
    return Rule(**value)


def read_asked(custom_params: Any, routing_key: str | None) -> bool | None:
    """Return whether a request asks to be exact, in `custom_params`, else in `routing_key`; None without a choice.

    Any value except "shared" counts as "exact" here. The server normally refuses other values earlier.
    """
    said = custom_params.get(KEY) if isinstance(custom_params, Mapping) else None
    said = read_routing_key(routing_key) if said is None else said
    return None if said is None else bool(said != SHARED)


def applies(rule: Rule, priority: int | None, low_first: bool = False) -> bool:
    """Return whether `rule` makes a request exact. With `low_first` smaller numbers are higher; None is the lowest."""
    if rule.default or rule.priority is None or priority is None:
        return rule.default
    return priority <= rule.priority if low_first else priority >= rule.priority


def read_routing_key(routing_key: str | None) -> str | None:
    """Return the value of this project's part of a routing key; None without the part, "" for a part without a value.

    The value of `user-7; expert_policy=exact`, from SGLang's header `X-SMG-Routing-Key`, is "exact".
    """
    for part in (routing_key or "").split(";"):
        name, _, value = part.partition("=")
        if name.strip() == KEY:
            return value.strip()
    return None


def name_prefixes(extra_key: str | None, exact: bool) -> str | None:
    """Return the `extra_key` of a request's cached prefixes, which exact requests never share with others.

    This project's part comes first, because SGLang appends and reads parts such as a LoRA adapter's id at the end.
    """
    if exact:
        return f"{NAMESPACE}|{extra_key}" if extra_key else NAMESPACE
    return f"{OURS}{SHARED}|{extra_key}" if extra_key and extra_key.startswith(OURS) else extra_key


def check_said(value: Any, source: str) -> None:
    """Raise ValueError for a value that a request may not set; `source` is the place of the value."""
    if value not in (None, EXACT, SHARED):
        raise ValueError(f"{source} must be {EXACT!r} or {SHARED!r} (got {as_json(value)})")
