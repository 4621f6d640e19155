"""What cannot be served, in one line for its user, whichever process finds the reason. Hooks end a server with it."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from .patching.errors import PatchError
from .patching.status import check_patched

REFUSED = 78
"""The exit status of a scheduler process that has refused its loaded model and printed why."""


class ExpertPolicyError(ValueError):
    """A refused configuration: `reason` says why `flag` cannot have its `value`, and what is allowed. `value` is None
    where the flag has none, and holds what stands beside the flag where both together are refused.

    As text it is one line of all three.
    """

    def __init__(self, flag: str, value: Any, reason: str) -> None:
        super().__init__(flag, value, reason)
        self.flag, self.value, self.reason = flag, value, reason

    def __str__(self) -> str:
        return f"{self.flag}: {self.reason}" if self.value is None else f"{self.flag} {self.value}: {self.reason}"


def refusal(flag: str, value: Any, reason: str) -> ExpertPolicyError:
    """What no expert policy can be served with: the flag, its value, why, and what is allowed."""
    return ExpertPolicyError(flag, value, f"cannot be served with an expert policy: {reason}")


def check_tree(flag: str) -> None:
    """Raise `ExpertPolicyError` unless the SGLang that runs is wholly patched by this version of the queue, for the
    `flag` that needs it.
    """
    try:
        check_patched()
    except PatchError as error:
        raise ExpertPolicyError(flag, None, str(error)) from None


def end_refused(error: ExpertPolicyError) -> NoReturn:
    """End a scheduler process that refuses its loaded model: SGLang would log a traceback and kill the server.

    All tensor-parallel ranks refuse for the same reason; the first one prints it.
    """
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_rank == 0:
        print(error, file=sys.stderr, flush=True)
    raise SystemExit(REFUSED) from None
