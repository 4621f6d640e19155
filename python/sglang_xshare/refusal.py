"""What cannot be served, in one line for its user, whichever process finds the reason. Hooks end a server with it."""

from typing import Any

REFUSED = 78
"""The exit status of a scheduler process that has refused its loaded model and printed why."""


class ExpertPolicyError(ValueError):
    """A refused configuration, as text one line: `reason` says why `flag` cannot have its `value` (None: it has none;
    or what stands beside the flag where both together are refused), and what is allowed.
    """

    def __init__(self, flag: str, value: Any, reason: str) -> None:
        super().__init__(flag, value, reason)
        self.flag, self.value, self.reason = flag, value, reason

    def __str__(self) -> str:
        return f"{self.flag}: {self.reason}" if self.value is None else f"{self.flag} {self.value}: {self.reason}"


def refusal(flag: str, value: Any, reason: str) -> ExpertPolicyError:
    """What no expert policy can be served with: the flag, its value, why, and what is allowed."""
    return ExpertPolicyError(flag, value, f"cannot be served with an expert policy: {reason}")
