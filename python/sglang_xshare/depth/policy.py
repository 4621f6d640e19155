"""SGLang's `AdaptiveSpecPolicy` (speculative/adaptive_runtime_state.py), choosing depths by tokens per second."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from .decision import Depths

OWN_TIMES = 15
"""The largest eager batch, in requests, with times of its own. A larger batch shares the times of the power of two
below its size, if both sizes have the same candidates.
"""


class Launch(NamedTuple):
    """A launched decode step, and what came before it: `forwards` of the target, and `switches` of the expert policy.

    `requests` is the batch size, and `size` the batch size whose depth and times apply (`ThroughputPolicy._pad`).
    """

    requests: int
    size: int
    depth: int
    forwards: int
    switches: int


class ThroughputPolicy:
    """The depth with the most tokens per second, for each captured batch size.

    `upstream` is SGLang's own policy, whose candidates at each batch size are used, with a depth of 0 added. The first
    depth is `start` drafts. `count_forwards` returns how many forwards of the target were launched, prefills included,
    and `count_switches` how often the expert policy was switched: both are the same on all ranks before the same step.
    `take_first_ranks`, a collective, takes this rank's numbers and returns the first rank's. `list_captured` returns
    the batch sizes that SGLang captures. `clock` returns seconds.
    """

    def __init__(
        self,
        upstream: Any,
        start: int,
        count_forwards: Callable[[], int],
        count_switches: Callable[[], int] = lambda: 0,
        take_first_ranks: Callable[[list[float]], list[float]] = list,
        list_captured: Callable[[], Sequence[int]] = tuple,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._find_candidates = cache(self._read_candidates)  # each launch of a large eager batch needs them
        # SGLang accepts true for 1, so the depths are made integers.
        self.candidate_steps = sorted({0, *map(int, upstream.candidate_steps)})
        self.depths = Depths(self._find_candidates, self.candidate_steps[-1], start)
        self.verifications = 0
        self.latest: int | None = None
        """The batch size of the last verification."""
        self._upstream = upstream
        self._count_forwards, self._count_switches = count_forwards, count_switches
        self._take_first_ranks, self._clock, self._list_captured = take_first_ranks, clock, list_captured
        self._captured: list[int] = []
        self._switches = 0
        # With overlap a step is launched before the previous step is complete.
        self._launched: deque[Launch] = deque(maxlen=4)
        self._former: tuple[Launch, float] | None = None
        self._taken: dict[int, list[tuple[Launch, float]]] = {}
        """The timed steps since the last decision, by batch size, in seconds of this rank's clock."""

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Read the batch sizes that SGLang really captures.

        The argument has the sizes of SGLang's flag, some of which SGLang replaces, so the argument is ignored.
        """
        self._captured = sorted(self._list_captured())

    def cuda_graph_bs_for_step(self, step: int) -> None:
        """Return None: SGLang captures all batch sizes at each depth, whatever is returned here."""

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Return the depth of the decode step of `batch_size` requests that is about to be launched."""
        switches = self._count_switches()
        if switches != self._switches:
            self._switches = switches
            self._taken.clear()
            self.depths.forget_times()
        size = self._pad(batch_size)
        depth = self.depths.find(size).current
        self._launched.append(Launch(batch_size, size, depth, self._count_forwards(), switches))
        return depth

    def on_verify_complete(self, num_correct_drafts_per_req: Sequence[int], batch_size: int) -> int | None:
        """Count a completed verification. If it ends a block (see `SizeState`), decide the depth of the next block.

        Return None: the depth changes with the next launch, when SGLang calls `get_steps_for_batch`.
        """
        now = self._clock()
        launch = self._match(batch_size)
        # If more drafts were accepted than launched, a result was dropped, and this launch belongs to another step.
        if launch is None or max(num_correct_drafts_per_req, default=0) > launch.depth:
            return None
        former, self._former = self._former, (launch, now)
        self.verifications += 1
        self.latest = launch.size
        if former is not None and self._is_timed(former[0], launch):
            self._taken.setdefault(launch.size, []).append((launch, now - former[1]))
        if self.depths.count(launch.size, launch.depth, num_correct_drafts_per_req):
            self._share_times(launch.size)
            self.depths.decide(launch.size)
        return None

    def _share_times(self, size: int) -> None:
        """Update the smoothed times of a batch size by the first rank's times since its last decision."""
        own = self._taken.pop(size, [])
        steps: dict[int, list[float]] = {}
        for (launch, _), seconds in zip(own, self._take_first_ranks([seconds for _, seconds in own]), strict=True):
            steps.setdefault(launch.depth, []).append(seconds)
        for depth, times in steps.items():
            self.depths.find(size).update_times(depth, times)

    def _is_timed(self, former: Launch, launch: Launch) -> bool:
        """Return whether the time between two results, of `former` and of `launch`, counts as the time of `launch`.

        The time counts if no forward ran between both, and if both have the same size, depth and expert policy. Nor may
        a prefill have been launched after `launch`: with overlap the host launches the next forward before it reads
        the result of `launch`, so the time would include the launch of the prefill.
        """
        latest = self._launched[-1] if self._launched else launch
        is_last = self._count_forwards() == latest.forwards + 1
        follows = launch.forwards == former.forwards + 1 and former.switches == self._switches
        return is_last and follows and (former.size, former.depth) == (launch.size, launch.depth)

    def _match(self, requests: int) -> Launch | None:
        """Return the earliest incomplete launch of this number of requests, and forget the launches before it."""
        while self._launched:
            launch = self._launched.popleft()
            if launch.requests == requests:
                return launch
        return None

    def _pad(self, requests: int) -> int:
        """Return the captured size in which a batch runs; for an eager batch, the size for which its times count."""
        place = bisect_left(self._captured, requests)
        if place < len(self._captured):
            return self._captured[place]
        shared = 1 << (requests.bit_length() - 1)
        if requests > OWN_TIMES and self._find_candidates(shared) == self._find_candidates(requests):
            return shared
        return requests

    def _read_candidates(self, size: int) -> tuple[int, ...]:
        # SGLang's candidates of a batch size are private. After `set_cuda_graph_bs([size])`, `cuda_graph_bs_for_step`
        # returns a non-empty list exactly if the depth is a candidate at that size.
        self._upstream.set_cuda_graph_bs([size])
        is_candidate = self._upstream.cuda_graph_bs_for_step
        return tuple(depth for depth in self.candidate_steps if depth == 0 or is_candidate(depth))
