"""Refusals of a server, each in one line for the user, in every process that finds a reason."""

from collections.abc import Iterator, Mapping
from typing import Any

REFUSED = 78
"""Exit status of a scheduler process that has refused its loaded model and printed the reason."""


class ExpertPolicyError(ValueError):
    """A refused configuration; the text is one line. `reason` contains what is allowed.

    `value` is the flag's value, None without a value, or the value and another flag if both together are refused.
    """

    def __init__(self, flag: str, value: Any, reason: str) -> None:
        super().__init__(flag, value, reason)
        self.flag, self.value, self.reason = flag, value, reason

    def __str__(self) -> str:
        return f"{self.flag}: {self.reason}" if self.value is None else f"{self.flag} {self.value}: {self.reason}"


def spell_flag(name: str) -> str:
    """Return the flag of an argument of SGLang's."""
    return f"--{name.replace('_', '-')}"


def spell_value(value: Any) -> str:
    """Return an argument's value in words."""
    return "none" if value is None else "on" if value is True else "off" if value is False else str(value)


def refusal(flag: str, value: Any, reason: str) -> ExpertPolicyError:
    """Return the refusal of a flag that no expert policy can be served with."""
    return ExpertPolicyError(flag, value, f"cannot be served with an expert policy: {reason}")


def refuse(name: str, value: Any, reason: str) -> ExpertPolicyError:
    """Return the refusal of an argument's value."""
    return refusal(spell_flag(name), spell_value(value), reason)


def list_others(config: Any, allowed: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, allowed value) of each argument that `config` has with another value than `allowed`."""
    for name, value in allowed.items():
        given = getattr(config, name, value)
        if given != value:
            yield name, given, value
