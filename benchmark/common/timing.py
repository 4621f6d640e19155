"""Times on one CPU thread, which do not count what else the machine does."""

import time
from collections.abc import Callable, Sequence

SLICE_S = 0.005
"""A timing shorter than this is noise."""


def time_alternating(timers: Sequence[Callable[[], float]], rounds: int, warm_ups: int = 1) -> list[list[float]]:
    """What each timer returns in every round, in which they take turns, so that a drift favours none of them."""
    times: list[list[float]] = [[] for _ in timers]
    for number in range(-warm_ups, rounds):
        for spent, timer in zip(times, timers, strict=True):
            value = timer()
            if number >= 0:
                spent.append(value)
    return times


def call_timer(call: Callable[[], object]) -> Callable[[], float]:
    """A timer of CPU seconds a call; it calls for about SLICE_S each time."""
    _time(call, 3)  # the first calls import and fill caches
    repeat = max(1, round(SLICE_S / max(_time(call, 3), 1e-9)))
    return lambda: _time(call, repeat)


def _time(call: Callable[[], object], repeat: int) -> float:
    began = time.process_time()
    for _ in range(repeat):
        call()
    return (time.process_time() - began) / repeat
