"""The decision on a draft depth: the most tokens per second, by what is accepted and what a step takes."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from .shares import Shares

MARGIN = 1.02
"""How many times faster another depth must be to replace the depth in use."""
TRIAL = 8
"""Verifications of a depth without a time."""
RETRIAL, PERIOD = 4, 256
"""Verifications of each neighbour of the depth in use, in so many of its batch size."""
BLOCK = 16
"""Verifications of the depth in use between two decisions."""
TIMES = 15
"""Times of a depth and batch size that are kept: their median ignores a step that waited for something else."""


def choose(tokens: Sequence[float], seconds: Mapping[int, float], depth: int) -> int:
    """Return the depth with the most tokens per second: `tokens[d]` in `seconds[d]`. Keep `depth` unless another is
    more than `MARGIN` times as fast; without a time of its own it gives way. Of equals the shallower wins.
    """
    speeds = {one: tokens[one] / taken for one, taken in seconds.items()}
    if not speeds:
        return depth
    best = max(sorted(speeds), key=speeds.__getitem__)
    return depth if depth in speeds and speeds[best] <= MARGIN * speeds[depth] else best


@dataclass
class Size:
    """The depth of one batch size, and what its steps took. `clock` counts its verifications; `left` of the current
    block are still to complete.
    """

    candidates: Sequence[int]
    depth: int
    trial: int | None = None
    left: int = 0
    clock: int = 0
    last: dict[int, int] = field(default_factory=dict)
    """The clock at the latest verification of each depth."""
    times: dict[int, deque[tuple[int, float]]] = field(default_factory=dict)
    """(clock, seconds) of each depth."""

    @property
    def current(self) -> int:
        """Return the depth of the next step."""
        return self.depth if self.trial is None else self.trial

    @property
    def seconds(self) -> dict[int, float]:
        """Return the smoothed time of a step, by depth, of the depths that have one."""
        return {depth: median(taken for _, taken in times) for depth, times in self.times.items()}

    def count(self, depth: int) -> bool:
        """Count a verification. Return whether the block has ended, so that the next depth must be decided."""
        self.clock += 1
        self.last[depth] = self.clock
        self.left -= depth == self.current
        return self.left <= 0

    def time(self, depth: int, seconds: float) -> None:
        """Keep a step's time. Times of more than two periods ago go: contexts and neighbours were others."""
        times = self.times.setdefault(depth, deque(maxlen=TIMES))
        while times and times[0][0] < self.clock - 2 * PERIOD:
            times.popleft()
        times.append((self.clock, seconds))

    def decide(self, tokens: Sequence[float]) -> None:
        """Choose the depth in use, then the next block: a trial that is due, or `BLOCK` verifications of that depth."""
        seconds = self.seconds
        self.depth = choose(tokens, seconds, self.depth)
        self.trial = next(self._find_due(seconds), None)
        untimed = self.current not in seconds
        self.left = BLOCK if self.trial is None else TRIAL if untimed else RETRIAL

    def _find_due(self, seconds: Mapping[int, float]) -> Iterator[int]:
        """Yield the depths that a trial is due for: without a time, or a neighbour, and not used for a period."""
        place = self.candidates.index(self.depth)
        neighbours = self.candidates[max(place - 1, 0) : place + 2]
        # The depth in use first, whose drafts count most for the shares.
        for depth in (self.depth, *self.candidates):
            is_old = self.clock - self.last.get(depth, -PERIOD) >= PERIOD
            if is_old and (depth not in seconds or (depth in neighbours and depth != self.depth)):
                yield depth


class Depths:
    """The depths of a server's batch sizes. `find_candidates` returns the candidates of a batch size, ascending, of at
    most `deepest` drafts; `start` is the depth before anything is known.
    """

    def __init__(self, find_candidates: Callable[[int], Sequence[int]], deepest: int, start: int) -> None:
        self.shares = Shares(deepest)
        self.sizes: dict[int, Size] = {}
        self._find_candidates, self._start = find_candidates, start

    def find(self, size: int) -> Size:
        """Return the state of a batch size, which begins with the depth of the nearest known batch size."""
        found = self.sizes.get(size)
        if found is None:
            candidates = self._find_candidates(size)
            near = min(self.sizes, key=lambda known: (abs(known - size), known), default=None)
            depth = self._start if near is None else self.sizes[near].depth
            depth = min(candidates, key=lambda one: (abs(one - depth), one))
            found = self.sizes[size] = Size(candidates, depth)
            found.decide(self.shares.expect())
        return found

    def count(self, size: int, depth: int, accepted: Sequence[int]) -> bool:
        """Count a completed verification. Return whether the next depth of its batch size must be decided."""
        self.shares.count(depth, accepted)
        return self.find(size).count(depth)

    def decide(self, size: int) -> None:
        """Decide the depth of a batch size until its next block ends."""
        self.sizes[size].decide(self.shares.expect())

    def forget_times(self) -> None:
        """Forget what steps took, as after a switch of the policy, and keep depths and shares."""
        for size in self.sizes.values():
            size.times.clear()
            size.last.clear()
            size.decide(self.shares.expect())
