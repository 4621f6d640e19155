"""What tests of a refusal compare: flag, value, one line. `compatibility/refusals.json` has the words."""

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest

from sglang_xshare.refusal import ExpertPolicyError


@contextmanager
def refused(what: str) -> Iterator[pytest.ExceptionInfo[ValueError]]:
    """Within it `what` is refused, a flag or key and its value: by the error's attributes, else by its line's begin."""
    with pytest.raises(ValueError, match=re.escape(what)) as raised:
        yield raised
    error, line = raised.value, str(raised.value)
    assert "\n" not in line
    if isinstance(error, ExpertPolicyError):
        assert (error.flag if error.value is None else f"{error.flag} {error.value}") == what
    assert line.startswith(f"{what}: ")


def refused_unless(served: bool, what: str) -> AbstractContextManager[object]:
    """Within it `what` is refused, as by `refused`, unless it is `served`."""
    return nullcontext() if served else refused(what)


def read_refusal(capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that refuses has printed: one line on stderr, and nothing else."""
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err[-1:]) == ("", 1, "\n")
    return err
