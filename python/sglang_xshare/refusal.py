"""Errors for configurations that a server refuses. Each error is one line."""

from collections.abc import Iterator, Mapping
from typing import Any

REFUSED = 78
"""The exit status of a scheduler process that has refused its loaded model and printed the reason."""


class ExpertPolicyError(ValueError):
    """An error for a configuration that is refused. Its message is one line, and `reason` says what is allowed.

    `value` is the value of the flag, or None if the flag has no value. If a combination of two flags is refused,
    `value` also contains the other flag.
    """

    def __init__(self, flag: str, value: Any, reason: str) -> None:
        super().__init__(flag, value, reason)
        self.flag, self.value, self.reason = flag, value, reason

    def __str__(self) -> str:
        return f"{self.flag}: {self.reason}" if self.value is None else f"{self.flag} {self.value}: {self.reason}"


def spell_flag(name: str) -> str:
    """Return the command-line flag for the name of a server argument."""
    return f"--{name.replace('_', '-')}"


def spell_value(value: Any) -> str:
    """Return the value of an argument as text."""
    return "none" if value is None else "on" if value is True else "off" if value is False else str(value)


def refusal(flag: str, value: Any, reason: str) -> ExpertPolicyError:
    """Return the error for a flag whose value no expert policy supports."""
    return ExpertPolicyError(flag, value, f"cannot be served with an expert policy: {reason}")


def refuse(name: str, value: Any, reason: str) -> ExpertPolicyError:
    """Return the error of `refusal` for a server argument. `name` is the name of the argument."""
    return refusal(spell_flag(name), spell_value(value), reason)


def list_others(config: Any, allowed: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each argument of `config` whose value differs from the value in `allowed`.

    Each result contains the argument's name, its value and the allowed value.
    """
    for name, value in allowed.items():
        given = getattr(config, name, value)
        if given != value:
            yield name, given, value
