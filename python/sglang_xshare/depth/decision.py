"""The choice of the draft depth that gives the most tokens per second.

The choice uses the measured times of steps and the shares of accepted draft tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType

from .shares import Shares

MARGIN = 1.02
"""The smallest factor by which another depth must be faster to replace the depth in use."""
TRIAL = 8
"""The number of verify steps in a trial of a depth that has no time yet, neither measured nor borrowed."""
RETRIAL, PERIOD = 4, 256
"""RETRIAL is the number of verify steps in a repeated trial, a trial of a depth that already has a time. Only the two
neighbours of the depth in use have repeated trials. PERIOD is the most verify steps at a batch size between two trials
of one depth.
"""
SOON, SLOWER = 32, 1.5
"""The first period after a change of the depth has SOON verify steps. Each next period is longer by the factor SLOWER,
up to PERIOD. A choice from few steps may be wrong, and short periods correct it soon. Servers were simulated for 600
verify steps after a change, with 6 % noise and 10 % drift. The slowest tenth of the servers reached 0.96 of the best
speed. When all periods were PERIOD, they reached 0.91.
"""
BLOCK = 16
"""The number of verify steps at the depth in use between two decisions. Two trials are at least this far apart."""
HISTORY = 8
"""The number of steps that a smoothed time covers. This is about three repeated trials, because 3 of the 4 steps in a
trial are timed.
"""
NEAR = 2
"""The largest ratio of two batch sizes at which one may borrow the times of the other. Some of 16 concurrent requests
end before others, so batches of 9 to 15 requests occur. Without borrowing, each of these batch sizes made 4 trials of 8
verify steps. A server then reached only 0.89 to 0.93 of the best depth's speed, for three rounds of the benchmark.
"""
CHANGE = 2.0
"""The largest factor by which one update changes a smoothed time. A limit is needed because the median of few steps may
be the time of a step that waited.
"""

NOTHING: Mapping[int, float] = MappingProxyType({})


def choose(tokens: Sequence[float], seconds: Mapping[int, float], depth: int) -> int:
    """Return the depth with the most tokens per second.

    The speed of depth d is `tokens[d] / seconds[d]`. Return `depth`, the depth in use, if it has no time, or if no
    other depth is more than `MARGIN` times as fast. If several depths are equally fast, return the smallest of them.
    """
    if depth not in seconds:
        return depth
    speeds = {one: tokens[one] / taken for one, taken in seconds.items()}
    best = max(sorted(speeds), key=speeds.__getitem__)
    return depth if speeds[best] <= MARGIN * speeds[depth] else best


@dataclass
class SizeState:
    """The depth of one batch size, and the smoothed times of its steps.

    A block is a run of verify steps at one depth. After each block, the depth is chosen again. A block has `BLOCK`
    verify steps at the depth in use (`depth`), or fewer in a trial of another depth (`trial`). `left` is the number of
    verify steps that remain in the current block. `clock` counts all verify steps at this batch size.
    """

    candidates: Sequence[int]
    depth: int
    trial: int | None = None
    left: int = 0
    period: float = SOON
    is_new: bool = True
    """True until the depth in use has completed its first block."""
    clock: int = 0
    last: dict[int, int] = field(default_factory=dict)
    """The value of `clock` at the latest verify step of each depth."""
    seconds: dict[int, float] = field(default_factory=dict)
    """The smoothed time of a step in seconds, for each depth that has a measured time."""
    _steps: dict[int, int] = field(default_factory=dict)

    @property
    def current(self) -> int:
        """Return the depth of the next step."""
        return self.depth if self.trial is None else self.trial

    def count(self, depth: int) -> bool:
        """Count a verify step. Return whether the block has ended, so the next depth must be chosen."""
        self.clock += 1
        self.last[depth] = self.clock
        if depth == self.current:
            self.left -= 1
        return self.left <= 0

    def update_times(self, depth: int, seconds: Sequence[float]) -> None:
        """Update the smoothed times after steps at one depth.

        `seconds` contains the measured times of these steps. Their median ignores a step that waited for something
        else. If the time of the depth in use changes, contexts have grown or the machine has become slower. The times
        of all depths are then scaled by the same factor, so they stay comparable. In the first block of a new depth,
        only its own time is updated. A change over few steps does not show that the other depths have changed.
        """
        before, taken = self.seconds.get(depth), median(seconds)
        self._steps[depth] = min(self._steps.get(depth, 0) + len(seconds), HISTORY)
        if before is None:
            self.seconds[depth] = taken
            return
        weight = len(seconds) / max(len(seconds), self._steps[depth])
        change = min(max(taken / before, 1 / CHANGE), CHANGE) ** weight
        is_settled = depth == self.depth and not self.is_new
        for changed in self.seconds if is_settled else (depth,):
            self.seconds[changed] *= change

    def forget_times(self) -> None:
        """Remove the times, so each depth is tried again."""
        for known in (self.seconds, self._steps, self.last):
            known.clear()
        self.period = SOON

    def decide(self, tokens: Sequence[float], borrowed: Mapping[int, float] = NOTHING) -> None:
        """Choose the depth in use and the next block.

        The next block is a trial, if one is due. Otherwise it has `BLOCK` verify steps at the depth in use. `tokens`
        contains the mean tokens that a request gets from a step at each depth. `borrowed` contains times for depths
        without a time.
        """
        seconds = {**borrowed, **self.seconds}
        former, self.depth = self.depth, choose(tokens, seconds, self.depth)
        self.is_new = former != self.depth
        if self.is_new:
            self.period = SOON
        has_run = not self.is_new and self.trial is None and self.depth in self.seconds
        self.trial = next(self._find_due(seconds), None) if has_run else None
        if self.trial is None:
            self.left = BLOCK
        elif self.trial in seconds:
            self.left = RETRIAL
            self.period = min(SLOWER * self.period, PERIOD)
        else:
            self.left = TRIAL

    def _find_due(self, seconds: Mapping[int, float]) -> Iterator[int]:
        """Yield the depths that are due for a trial, because they were not used for a period.

        Depths without a time come first, then the neighbours of the depth in use.
        """
        place = self.candidates.index(self.depth)
        neighbours = [one for one in self.candidates[max(place - 1, 0) : place + 2] if one != self.depth]
        untimed = [one for one in (*neighbours, *self.candidates) if one not in seconds]
        yield from (one for one in untimed if self.clock - self.last.get(one, -PERIOD) >= PERIOD)
        timed = [one for one in neighbours if one in seconds]
        yield from (one for one in timed if self.clock - self.last.get(one, 0) >= self.period)


class Depths:
    """The depths of a server's batch sizes.

    `find_candidates` returns the depths that a batch size may use, in ascending order. `deepest` is the largest of all
    depths, and `start` is the first depth.
    """

    def __init__(self, find_candidates: Callable[[int], Sequence[int]], deepest: int, start: int) -> None:
        self.shares = Shares(deepest)
        self.states: dict[int, SizeState] = {}
        self._find_candidates, self._start = find_candidates, start

    def find(self, size: int) -> SizeState:
        """Return the state of a batch size. The depth of a new batch size comes from `_copy_depth`."""
        found = self.states.get(size)
        if found is None:
            candidates = self._find_candidates(size)
            found = self.states[size] = SizeState(candidates, self._copy_depth(size, candidates))
            found.decide(self.shares.expect())
        return found

    def count(self, size: int, depth: int, accepted: Sequence[int]) -> bool:
        """Count a completed verify step. Return whether the next depth of its batch size must be chosen."""
        self.shares.count(depth, accepted)
        return self.find(size).count(depth)

    def decide(self, size: int) -> None:
        """Choose the draft depth for the next block of steps at a batch size.

        A step is timed only if the step before it had the same batch size and depth. A batch size may have no such
        step, for example if a prefill runs before each of its steps. Then it copies the depth of another batch size.
        """
        own = self.states[size]
        if not own.seconds:
            own.depth = self._copy_depth(size, own.candidates)
        own.decide(self.shares.expect(), self._borrow(size))

    def _copy_depth(self, size: int, candidates: Sequence[int]) -> int:
        """Return a depth for a batch size that has no times.

        The depth comes from the nearest batch size with measured step times. If no batch size has been measured, the
        depth comes from the nearest known batch size, which may be `size` itself. The first batch size of the server
        uses the start depth. If the depth is not in `candidates`, return the nearest candidate.
        """
        timed = [known for known, state in self.states.items() if state.seconds]
        near = min(timed or self.states, key=lambda one: (abs(one - size), one), default=None)
        depth = self._start if near is None else self.states[near].depth
        return min(candidates, key=lambda one: (abs(one - depth), one))

    def _borrow(self, size: int) -> dict[int, float]:
        """Return an estimated time for each depth that has no time at this batch size.

        The estimate uses the nearest batch size that has times for this depth and for the depth in use. The ratio of
        these two times is assumed to be the same at both batch sizes.
        """
        own, found = self.states[size], dict[int, float]()
        missing = [one for one in own.candidates if one not in own.seconds]
        if not missing or own.depth not in own.seconds:
            return found
        near = [known for known in self.states if known != size and max(known, size) <= NEAR * min(known, size)]
        for known in sorted(near, key=lambda known: (abs(known - size), known)):
            times = self.states[known].seconds
            if own.depth in times:
                factor = own.seconds[own.depth] / times[own.depth]
                for depth in missing:
                    if depth in times:
                        found.setdefault(depth, times[depth] * factor)
        return found

    def forget_times(self) -> None:
        """Remove the times of all steps, for example after a switch of the policy. Keep the depths and the shares."""
        for state in self.states.values():
            state.forget_times()
            state.decide(self.shares.expect())
