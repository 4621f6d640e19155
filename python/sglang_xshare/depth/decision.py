"""The choice of a draft depth: the most tokens per second, from the accepted drafts and the times of steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType

from .shares import Shares

MARGIN = 1.02
"""The smallest gain in speed, as a factor, for which another depth replaces the depth in use."""
TRIAL = 8
"""Verifications in a trial of a depth that has no time yet."""
RETRIAL, PERIOD = 4, 256
"""RETRIAL: verifications in a repeated trial, of a neighbour of the chosen depth. PERIOD: the most verifications at a
batch size between two trials of one depth.
"""
SOON, SLOWER = 32, 1.5
"""The first period after a change of the depth, and the factor by which each next period is longer, up to PERIOD. A
choice from few steps may be wrong; short periods correct it soon. In 600 simulated verifications after a change (6 %
noise, 10 % drift) the slowest tenth of the servers reached 0.96 of the best speed, and 0.91 with PERIOD from the start
on.
"""
BLOCK = 16
"""Verifications of the chosen depth between two decisions; two trials are at least this many apart."""
HISTORY = 8
"""Steps that the smoothed time of a depth covers: about three retrials, each of which times 3 of its 4 steps."""
NEAR = 2
"""The largest ratio of two batch sizes if one borrows the times of the other. Some of 16 concurrent requests end before
others, so batches of 9 to 15 come and go. Without borrowing, each of these sizes made 4 trials of 8 verifications, and
a server reached only 0.89 to 0.93 of the best depth's speed for three rounds of the benchmark.
"""
CHANGE = 2.0
"""The largest factor of one update of a smoothed time: the median of few steps may be a step that waited."""

NOTHING: Mapping[int, float] = MappingProxyType({})


def choose(tokens: Sequence[float], seconds: Mapping[int, float], depth: int) -> int:
    """Return the depth with the most tokens per second, `tokens[d] / seconds[d]`, or keep `depth`.

    Keep `depth` if it has no time, or if no other depth is more than `MARGIN` times as fast. Of equally fast depths
    return the shallowest.
    """
    if depth not in seconds:
        return depth
    speeds = {one: tokens[one] / taken for one, taken in seconds.items()}
    best = max(sorted(speeds), key=speeds.__getitem__)
    return depth if speeds[best] <= MARGIN * speeds[depth] else best


@dataclass
class SizeState:
    """The depth of one batch size, and the smoothed times of its steps.

    A block is a run of verifications at one depth, after which the depth is decided anew: `BLOCK` verifications at the
    chosen depth `depth`, or fewer at the depth `trial`. `left` verifications remain in the current block, and `clock`
    counts all verifications at this batch size.
    """

    candidates: Sequence[int]
    depth: int
    trial: int | None = None
    left: int = 0
    period: float = SOON
    is_new: bool = True
    """True until the depth in use has completed a block."""
    clock: int = 0
    last: dict[int, int] = field(default_factory=dict)
    """The clock at the latest verification of each depth."""
    seconds: dict[int, float] = field(default_factory=dict)
    """The smoothed time of a step, by depth, for the depths that have a time."""
    _steps: dict[int, int] = field(default_factory=dict)

    @property
    def current(self) -> int:
        """Return the depth of the next step."""
        return self.depth if self.trial is None else self.trial

    def count(self, depth: int) -> bool:
        """Count a verification. Return whether the block has ended, so the next depth must be decided."""
        self.clock += 1
        self.last[depth] = self.clock
        if depth == self.current:
            self.left -= 1
        return self.left <= 0

    def update_times(self, depth: int, seconds: Sequence[float]) -> None:
        """Update the smoothed times with the `seconds` of steps of one depth.

        The median ignores a step that waited for something else. A change at the depth in use scales the times of all
        depths, because contexts have grown or the machine has become slower: so times of different moments stay
        comparable. In the first block of a new depth only its own time is updated: the time is from few steps, so its
        change is no sign of a change at the other depths.
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
        """Forget the times, so each depth is tried again."""
        for known in (self.seconds, self._steps, self.last):
            known.clear()
        self.period = SOON

    def decide(self, tokens: Sequence[float], borrowed: Mapping[int, float] = NOTHING) -> None:
        """Choose the depth in use, then the next block: `BLOCK` verifications of that depth, or a trial that is due.

        `borrowed` times replace those that are missing.
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
        """Yield the depths due for a trial: those without a time, then neighbours that were not used for a period."""
        place = self.candidates.index(self.depth)
        neighbours = [one for one in self.candidates[max(place - 1, 0) : place + 2] if one != self.depth]
        untimed = [one for one in (*neighbours, *self.candidates) if one not in seconds]
        yield from (one for one in untimed if self.clock - self.last.get(one, -PERIOD) >= PERIOD)
        timed = [one for one in neighbours if one in seconds]
        yield from (one for one in timed if self.clock - self.last.get(one, 0) >= self.period)


class Depths:
    """The depths of a server's batch sizes.

    `find_candidates` returns the depths to choose from at a batch size, ascending, of at most `deepest` drafts; `start`
    is the first depth.
    """

    def __init__(self, find_candidates: Callable[[int], Sequence[int]], deepest: int, start: int) -> None:
        self.shares = Shares(deepest)
        self.states: dict[int, SizeState] = {}
        self._find_candidates, self._start = find_candidates, start

    def find(self, size: int) -> SizeState:
        """Return the state of a batch size; a new size copies its depth from the nearest one (`_copy_depth`)."""
        found = self.states.get(size)
        if found is None:
            candidates = self._find_candidates(size)
            found = self.states[size] = SizeState(candidates, self._copy_depth(size, candidates))
            found.decide(self.shares.expect())
        return found

    def count(self, size: int, depth: int, accepted: Sequence[int]) -> bool:
        """Count a completed verification. Return whether the next depth of its batch size must be decided."""
        self.shares.count(depth, accepted)
        return self.find(size).count(depth)

    def decide(self, size: int) -> None:
        """Decide the depth of a batch size until its next block ends.

        Only a step directly after a step of the same size and depth is timed. A size that never has such a step, for
        example with a prefill before each, has no times: it copies the depth of the nearest size that has times.
        """
        own = self.states[size]
        if not own.seconds:
            own.depth = self._copy_depth(size, own.candidates)
        own.decide(self.shares.expect(), self._borrow(size))

    def _copy_depth(self, size: int, candidates: Sequence[int]) -> int:
        """Return the candidate nearest to the depth of the nearest batch size that has times.

        If no size has times, the nearest known size takes its place: `size` itself, if it is known. The first size of
        all begins at the start depth.
        """
        timed = [known for known, state in self.states.items() if state.seconds]
        near = min(timed or self.states, key=lambda one: (abs(one - size), one), default=None)
        depth = self._start if near is None else self.states[near].depth
        return min(candidates, key=lambda one: (abs(one - depth), one))

    def _borrow(self, size: int) -> dict[int, float]:
        """Return an estimated time for each depth that has no time at this batch size.

        The estimate is from the nearest batch size that has timed that depth and the depth in use: there the two times
        show how much longer a step of that depth takes.
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
        """Forget the times of steps, as after a switch of the policy. Keep depths and shares."""
        for state in self.states.values():
            state.forget_times()
            state.decide(self.shares.expect())
