"""Refusals of a server, in one line for the user, whichever process finds the reason."""

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


def refusal(flag: str, value: Any, reason: str) -> ExpertPolicyError:
    """Return the refusal of a flag that no expert policy can be served with."""
    return ExpertPolicyError(flag, value, f"cannot be served with an expert policy: {reason}")
