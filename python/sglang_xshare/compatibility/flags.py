"""SGLang's arguments, as an error spells them."""

from collections.abc import Iterator, Mapping
from typing import Any

from ..refusal import ExpertPolicyError, refusal, spell_flag


def spell_value(value: Any) -> str:
    """Return an argument's value in words."""
    return "none" if value is None else "on" if value is True else "off" if value is False else str(value)


def refuse(name: str, value: Any, reason: str) -> ExpertPolicyError:
    """Return the refusal of an argument's value."""
    return refusal(spell_flag(name), spell_value(value), reason)


def list_others(config: Any, allowed: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, allowed value) of each argument that `config` has with another value than `allowed`."""
    for name, value in allowed.items():
        given = getattr(config, name, value)
        if given != value:
            yield name, given, value
