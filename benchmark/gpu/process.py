"""Processes of the GPU run. Each one has its own session. When the process ends, the whole session is killed."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from benchmark.common.paths import ROOT
from benchmark.common.server import die_with_parent
from benchmark.gpu.checks import shorten

GRACE = 10.0  # seconds that a stopped task has to stop its servers


@dataclass(frozen=True)
class Ended:
    """The result of a process.

    `status` is the exit status, or None if the process was stopped. `reason` is the last message of a failed process.
    """

    status: int | None
    reason: str
    seconds: float


class Process:
    """A Python process in a session of its own. `env` contains additional environment variables."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed in `finish`
        self._process = subprocess.Popen(
            [sys.executable, "-u", *arguments],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stderr=self._errors,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    @property
    def status(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        return self._process.poll()

    def finish(self, limit: float) -> Ended:
        """Wait until the process ends, but at most `limit` seconds. Then kill all processes of its session."""
        began, status = monotonic(), None
        try:
            status = self._process.wait(limit)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        finally:
            self._signal(signal.SIGKILL)  # kills the children, and after an interrupt also the process itself
            self._process.wait()
        with self._errors:
            self._errors.seek(0)
            errors = self._errors.read()
        print(errors, end="", file=sys.stderr, flush=True)
        lines = [line for line in errors.splitlines() if line.strip()] or [f"status {status}"]
        last = next((line for line in reversed(lines) if line.startswith("gpu: ")), lines[-1])
        return Ended(status, shorten(last.removeprefix("gpu: ")) if status else "", monotonic() - began)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole process group of the session."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
