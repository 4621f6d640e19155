"""What makes a request exact: what it says itself, and what the policy in force says of those that say nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .keys import as_json

KEY = "expert_policy"
"""Of `custom_params` in a request's sampling parameters."""
EXACT, SHARED = "exact", "shared"
OURS = f"{KEY}="
"""What our part of an `extra_key`, or of a routing key, begins with."""
NAMESPACE = OURS + EXACT
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


def read_asked(custom_params: Any, routing_key: str | None) -> bool | None:
    """Return whether a request asks to be exact, by its `custom_params`, else by its `routing_key`; None if neither
    says anything. A value that a front end did not check asks for an exact answer.
    """
    said = custom_params.get(KEY) if isinstance(custom_params, Mapping) else None
    said = read_routing_key(routing_key) if said is None else said
    return None if said is None else bool(said != SHARED)


def applies(rule: Rule, priority: int | None, low_first: bool = False) -> bool:
    """Return whether `rule` makes a request exact. With `low_first` a lower priority is the higher one; a request
    without a priority has the least.
    """
    if rule.default or rule.priority is None or priority is None:
        return rule.default
    return priority <= rule.priority if low_first else priority >= rule.priority


def read_routing_key(routing_key: str | None) -> str | None:
    """Return the value of our part of a routing key, SGLang's header `X-SMG-Routing-Key`: "exact" for
    `user-7; expert_policy=exact`. Return None for a key without such a part, "" for a part without a value.
    """
    for part in (routing_key or "").split(";"):
        name, _, value = part.partition("=")
        if name.strip() == KEY:
            return value.strip()
    return None


def name_prefixes(extra_key: str | None, exact: bool) -> str | None:
    """Return the `extra_key` under which a request's prefixes are cached: of exact requests and of others never the
    same, whatever a client has sent. Ours stands in front: what SGLang adds behind, such as a LoRA adapter's id, it
    also reads there.
    """
    if exact:
        return f"{NAMESPACE}|{extra_key}" if extra_key else NAMESPACE
    return f"{OURS}{SHARED}|{extra_key}" if extra_key and extra_key.startswith(OURS) else extra_key


def check_said(value: Any, source: str) -> None:
    """Raise ValueError in one line for what a request may not say; `source` is the place of the value."""
    if value not in (None, EXACT, SHARED):
        raise ValueError(f"{source} must be {EXACT!r} or {SHARED!r} (got {as_json(value)})")
