"""An implementation of SGLang's `AdaptiveSpecPolicy` that chooses depths by tokens per second.

SGLang defines the interface in speculative/adaptive_runtime_state.py.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from .decision import Depths

OWN_TIMES = 15
"""The largest eager batch, in requests, that has its own times. A larger eager batch shares the times of the power of
two below its size, if both sizes have the same candidates.
"""


class Launch(NamedTuple):
    """A launched decode step.

    `requests` is its batch size. `size` is the batch size whose depth and times apply (see `ThroughputPolicy._pad`).
    `forwards` and `switches` count the forwards of the target model and the policy switches before this step.
    """

    requests: int
    size: int
    depth: int
    forwards: int
    switches: int


class ThroughputPolicy:
    """A policy that chooses the depth with the most tokens per second, for each captured batch size.

    `upstream` is SGLang's own policy. Its candidates are used at each batch size, together with a depth of 0. `start`
    is the first depth. `count_forwards` returns how many forwards of the target model were launched, including
    prefills. `count_switches` returns how often the expert policy was switched. All ranks have the same counts before
    the same step. `take_first_ranks` is a collective. It takes this rank's numbers and returns the first rank's
    numbers. `list_captured` returns the batch sizes that SGLang captures. `clock` returns the time in seconds.
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
        # SGLang also accepts `true` in place of 1, so the depths are converted to integers.
        self.candidate_steps = sorted({0, *map(int, upstream.candidate_steps)})
        self.depths = Depths(self._find_candidates, self.candidate_steps[-1], start)
        self.verifications = 0
        self.latest: int | None = None
        """The batch size of the last verify step."""
        self._upstream = upstream
        self._count_forwards, self._count_switches = count_forwards, count_switches
        self._take_first_ranks, self._clock, self._list_captured = take_first_ranks, clock, list_captured
        self._captured: list[int] = []
        self._switches = 0
        # With overlap scheduling, a step is launched before the previous step is complete.
        self._launched: deque[Launch] = deque(maxlen=4)
        self._former: tuple[Launch, float] | None = None
        self._taken: dict[int, list[tuple[Launch, float]]] = {}
        """The timed steps of each batch size since its last decision, in seconds of this rank's clock."""

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Read the batch sizes that SGLang captures.

        The argument is ignored. It contains the batch sizes of SGLang's flag, and SGLang replaces some of them.
        """
        self._captured = sorted(self._list_captured())

    def cuda_graph_bs_for_step(self, step: int) -> None:
        """Return None. SGLang ignores this result, and captures all batch sizes at each depth."""

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Return the depth of the decode step that SGLang launches next. `batch_size` is its number of requests."""
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
        """Count a completed verify step. If it ends a block (see `SizeState`), choose the depth of the next block.

        Return None, because the depth changes only when SGLang calls `get_steps_for_batch` for the next launch.
        """
        now = self._clock()
        launch = self._match(batch_size)
        # If more drafts were accepted than launched, SGLang has dropped a result, and `launch` is another step's.
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
        """Update the smoothed times of a batch size with the times since its last decision.

        All ranks use the times of the first rank.
        """
        own = self._taken.pop(size, [])
        steps: dict[int, list[float]] = {}
        for (launch, _), seconds in zip(own, self._take_first_ranks([seconds for _, seconds in own]), strict=True):
            steps.setdefault(launch.depth, []).append(seconds)
        for depth, times in steps.items():
            self.depths.find(size).update_times(depth, times)

    def _is_timed(self, former: Launch, launch: Launch) -> bool:
        """Return whether the time between two results counts as the time of the later step.

        `former` and `launch` are the launches of the two steps. The time counts if no forward ran between the steps,
        and if both have the same batch size, depth and expert policy. Also, no prefill may have been launched after
        `launch`. With overlap scheduling, the host launches such a prefill before it reads the result of `launch`. The
        time would then include the launch of the prefill.
        """
        latest = self._launched[-1] if self._launched else launch
        is_last = self._count_forwards() == latest.forwards + 1
        follows = launch.forwards == former.forwards + 1 and former.switches == self._switches
        return is_last and follows and (former.size, former.depth) == (launch.size, launch.depth)

    def _match(self, requests: int) -> Launch | None:
        """Return the earliest incomplete launch with this number of requests, or None if there is none.

        Remove the launches before it.
        """
        while self._launched:
            launch = self._launched.popleft()
            if launch.requests == requests:
                return launch
        return None

    def _pad(self, requests: int) -> int:
        """Return the batch size whose depth and times apply to a batch.

        For a captured batch, this is its captured batch size. For an eager batch, see `OWN_TIMES`.
        """
        place = bisect_left(self._captured, requests)
        if place < len(self._captured):
            return self._captured[place]
        shared = 1 << (requests.bit_length() - 1)
        if requests > OWN_TIMES and self._find_candidates(shared) == self._find_candidates(requests):
            return shared
        return requests

    def _read_candidates(self, size: int) -> tuple[int, ...]:
        # The candidates of a batch size are private in SGLang. After `set_cuda_graph_bs([size])`,
        # `cuda_graph_bs_for_step` returns a non-empty list for each candidate at that size, and only for candidates.
        self._upstream.set_cuda_graph_bs([size])
        is_candidate = self._upstream.cuda_graph_bs_for_step
        return tuple(depth for depth in self.candidate_steps if depth == 0 or is_candidate(depth))
