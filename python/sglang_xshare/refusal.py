"""How a server is refused: with one line for its user and exit status 1, whichever process finds the reason."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from .patching.errors import PatchError
from .patching.status import check_patched

REFUSED = 78
"""The exit status of a scheduler process that has refused its loaded model and printed why."""


class ExpertPolicyError(SystemExit, ValueError):
    """A refused configuration, in one line.

    Uncaught, Python prints the line and exits with status 1, without a traceback: what a server's user wants. It is a
    `ValueError` too, which is what a user of `Engine(...)` catches.
    """


def refusal(flag: str, value: Any, reason: str) -> ExpertPolicyError:
    """One line: the flag, its value, why an expert policy cannot be served with it, and what is allowed."""
    return ExpertPolicyError(f"{flag} {value}: cannot be served with an expert policy: {reason}")


def check_tree(flag: str = "--expert-policy") -> None:
    """Raise `ExpertPolicyError` unless the SGLang that runs is wholly patched by this version of the queue, for the
    `flag` that needs it.
    """
    try:
        check_patched()
    except PatchError as error:
        raise ExpertPolicyError(f"{flag}: {error}") from None


def end_refused(error: ExpertPolicyError) -> NoReturn:
    """End a scheduler process that refuses its loaded model: SGLang would log a traceback and kill the server.

    All tensor-parallel ranks refuse for the same reason; the first one prints it.
    """
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_rank == 0:
        print(error, file=sys.stderr, flush=True)
    raise SystemExit(REFUSED) from None


def check_exit(code: int | None) -> None:
    """In the server's process, for a scheduler that ended with `code`: raise `ExpertPolicyError` where it has refused
    its model.
    """
    if code == REFUSED:
        error = ExpertPolicyError("--expert-policy: the scheduler refused the loaded model and said why")
        # The scheduler has printed the reason; exit with status 1 and print nothing more.
        error.code = 1
        raise error
