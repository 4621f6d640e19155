"""Exact requests: the request's own choice, and the active policy's default for requests without a choice."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .keys import MOST, as_json

KEY = "expert_policy"
"""The key that this project reads from `custom_params` in a request's sampling parameters."""
EXACT, SHARED = "exact", "shared"
OURS = f"{KEY}="
"""The beginning of this project's part of an `extra_key` or of a routing key."""
NAMESPACE = OURS + EXACT
"""The part of SGLang's `extra_key` that separates the cached prefixes of exact requests from all others."""
ALLOWED = 'an object such as {"priority": 10} or {"default": true}'


@dataclass(frozen=True)
class Rule:
    """The rule that decides whether a request without `expert_policy` is exact.

    If `default` is True, all these requests are exact. If `priority` is a number, requests with this priority or a
    higher one are exact. Otherwise no such request is exact.
    """

    priority: int | None = None
    default: bool = False

    @property
    def given(self) -> dict[str, Any]:
        """The rule in the form of the policy's key `exact`. The dict is empty if there is no rule."""
        return {name: value for name, value in vars(self).items() if value is not None and value is not False}


def read_rule(value: Any) -> Rule:
    """Return the rule that the policy's key `exact` contains. Raises ValueError naming the allowed values."""
    wrong = not isinstance(value, Mapping) or not value or bool(value.keys() - {"priority", "default"})
    if wrong or type(value.get("priority", 0)) is not int or type(value.get("default", False)) is not bool:
        raise ValueError(f"exact = {as_json(value)}: must be {ALLOWED}")
    if abs(value.get("priority", 0)) > MOST:
        raise ValueError(f"exact = {as_json(value)}: priority must be from -{MOST} to {MOST}")
    return Rule(**value)


def read_asked(custom_params: Any, routing_key: str | None) -> bool | None:
    """Return whether a request asks to be exact, or None if the request makes no choice.

    The choice in `custom_params` has precedence over the choice in `routing_key`. Any value except "shared" counts as
    "exact" here. Normally the server has already refused every value that is not "exact" or "shared".
    """
    said = custom_params.get(KEY) if isinstance(custom_params, Mapping) else None
    said = read_routing_key(routing_key) if said is None else said
    return None if said is None else bool(said != SHARED)


def applies(rule: Rule, priority: int | None, low_first: bool = False) -> bool:
    """Return whether `rule` makes a request of this priority exact.

    With `low_first` a smaller number is a higher priority. A request with priority None has the lowest priority.
    """
    if rule.default or rule.priority is None or priority is None:
        return rule.default
    return priority <= rule.priority if low_first else priority >= rule.priority


def read_routing_key(routing_key: str | None) -> str | None:
    """Return the value of this project's part of a routing key. Return None if the routing key has no such part.

    For example, the value is "exact" for the header `X-SMG-Routing-Key: user-7; expert_policy=exact`. If the part has
    no value, return "".
    """
    for part in (routing_key or "").split(";"):
        name, _, value = part.partition("=")
        if name.strip() == KEY:
            return value.strip()
    return None


def name_prefixes(extra_key: str | None, exact: bool) -> str | None:
    """Return the `extra_key` under which SGLang caches the prefixes of a request.

    Exact requests have other keys than all other requests, so the two kinds never share a cached prefix. This project's
    part is at the beginning of the key. SGLang appends and reads other parts, such as a LoRA adapter's id, at the end.
    """
    if exact:
        return f"{NAMESPACE}|{extra_key}" if extra_key else NAMESPACE
    return f"{OURS}{SHARED}|{extra_key}" if extra_key and extra_key.startswith(OURS) else extra_key


def check_said(value: Any, source: str) -> None:
    """Raise ValueError if a request may not set this value. The error names `source`, the place that contains it."""
    if value not in (None, EXACT, SHARED):
        raise ValueError(f"{source} must be {EXACT!r} or {SHARED!r} (got {as_json(value)})")
