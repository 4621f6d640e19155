"""A plain simulation of a server that drafts: what is accepted, and what a step takes, are given numbers."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_xshare.depth.policy import ThroughputPolicy

CANDIDATES = (0, 1, 3, 5, 7)
WELL, BADLY = (0.85, 0.8, 0.78, 0.75, 0.72, 0.7, 0.7), (0.15, 0.2, 0.2)
"""The chance of each draft after those before it, of text that a draft model predicts; the last stands for the rest."""


class Candidates:
    """SGLang's policy as far as candidates are read of it: `by_size` holds those from each batch size on."""

    def __init__(self, by_size: dict[int, Sequence[int]] | None = None) -> None:
        self.by_size = by_size or {1: CANDIDATES}
        self.candidate_steps = sorted({one for candidates in self.by_size.values() for one in candidates})
        self._sizes: list[int] = []

    def set_cuda_graph_bs(self, sizes: list[int]) -> None:
        self._sizes = sizes

    def cuda_graph_bs_for_step(self, step: int) -> list[int]:
        def find(size: int) -> Sequence[int]:
            return self.by_size[max((first for first in self.by_size if first <= size), default=min(self.by_size))]

        return [size for size in self._sizes if step in find(size)]


@dataclass(frozen=True)
class Traffic:
    """`requests` that run together; `chances` that each draft is accepted; `seconds` of a step by its drafts."""

    requests: int
    chances: Sequence[float]
    seconds: Callable[[int], float]

    def tokens(self, depth: int) -> float:
        """Return the tokens of a request and step, in the mean."""
        total = chance = 1.0
        for place in range(depth):
            chance *= self.chance(place)
            total += chance
        return total

    def chance(self, place: int) -> float:
        return self.chances[min(place, len(self.chances) - 1)]

    def speed(self, depth: int) -> float:
        return self.tokens(depth) / self.seconds(depth)

    @property
    def best(self) -> int:
        return max(CANDIDATES, key=self.speed)

    def accept(self, depth: int, drawn: random.Random) -> list[int]:
        """Return the accepted drafts of each request in one verification."""
        accepted = []
        for _ in range(self.requests):
            number = 0
            while number < depth and drawn.random() < self.chance(number):
                number += 1
            accepted.append(number)
        return accepted


def costs(first: float, each: float, drafting: float = 0.0) -> Callable[[int], float]:
    """Return the seconds of a step that verifies 1 + d rows, `each` a row, and drafts if d > 0."""
    return lambda depth: first + each * depth + (drafting if depth else 0.0)


@dataclass
class Simulation:
    """A scheduler with overlap: a step is launched before the result of the one before it is processed.

    `launching` is how long the host launches a prefill, in which time it sees no result.
    """

    noise: float = 0.03
    seed: int = 0
    start: int = 3
    launching: float = 0.0
    upstream: Any = field(default_factory=Candidates)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = self.device = 0.0
        self.forwards = 0
        self.drawn = random.Random(self.seed)
        options = {"clock": lambda: self.now} | self.options
        self.policy = ThroughputPolicy(self.upstream, self.start, lambda: self.forwards, **options)
        self.launched: deque[tuple[Traffic, int, float, float]] = deque()

    def prefill(self, seconds: float) -> None:
        """Launch a prefill, and complete all that was launched before."""
        self.forwards += 1
        self.now += self.launching
        self._launch(Traffic(0, (), costs(0, 0)), -1, seconds)

    def step(self, traffic: Traffic) -> int:
        """Launch a step, complete all but the last that were launched before, and return the depth in use."""
        depth = self.policy.get_steps_for_batch(traffic.requests)
        self.forwards += 1
        # Some steps wait for something that has nothing to do with their depth.
        seconds = traffic.seconds(depth) * max(0.5, self.drawn.gauss(1, self.noise)) + (self.drawn.random() < 0.005)
        self._launch(traffic, depth, seconds)
        return self.policy.depths.find(traffic.requests).depth

    def _launch(self, traffic: Traffic, depth: int, seconds: float) -> None:
        self.launched.append((traffic, depth, seconds, self.now))
        while len(self.launched) > 1:
            done, drafts, taken, launched = self.launched.popleft()
            self.device = max(self.device, launched) + taken
            self.now = max(self.now, self.device)
            if drafts >= 0:
                assert self.policy.on_verify_complete(done.accept(drafts, self.drawn), done.requests) is None

    def serve(self, traffic: Traffic, steps: int) -> list[int]:
        """Return the depth in use after each of so many steps."""
        return [self.step(traffic) for _ in range(steps)]

    def launch(self, traffic: Traffic, steps: int) -> list[int]:
        """Return the depth of each of so many steps, trials included."""
        used = []
        for _ in range(steps):
            self.step(traffic)
            used.append(self.launched[-1][1])
        return used

    def reach(self, traffic: Traffic, steps: int) -> float:
        """Return the tokens per second of so many steps, trials included, of those of the best fixed depth."""
        used = self.launch(traffic, steps)
        tokens, seconds = sum(map(traffic.tokens, used)), sum(map(traffic.seconds, used))
        return tokens / seconds / traffic.speed(traffic.best)
