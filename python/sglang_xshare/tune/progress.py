"""How far a search is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from .measure import Bench

EVERY = 30.0
"""Seconds between two lines where there is no terminal."""


class Told:
    """Counts what a bench measures from here on, of about `total`, and tells the time that is left: for each as many
    seconds as those took that were not known before.
    """

    def __init__(
        self, bench: Bench, console: Console, title: str, total: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.bench, self.console, self.title, self.total, self.clock = bench, console, title, total, clock
        self._before = len(bench.asked), bench.measured
        self._began = self._last = clock()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}")
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(title, total=total, left="")

    def __enter__(self) -> Told:
        self._bar.start()
        self.console.print(f"{self.title}: about {self.total} measurements")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def tell(self, line: str) -> None:
        """What was measured last."""
        done, left = len(self.bench.asked) - self._before[0], self._format_left()
        if self.console.is_terminal:
            self._bar.update(self._task, completed=done, total=max(self.total, done), left=left)
            self.console.print(line)
        elif self.clock() - self._last >= EVERY:
            self._last = self.clock()
            self.console.print(f"{self.title}: {done} of about {self.total} measurements, {left}; {line}")

    def _format_left(self) -> str:
        done, measured = len(self.bench.asked) - self._before[0], self.bench.measured - self._before[1]
        if not measured:
            return "time left unknown"
        seconds = (self.clock() - self._began) / measured * max(self.total - done, 0)
        return f"about {math.ceil(seconds / 60)} min left"
