"""The shares of drafts that the target accepts, by their depth."""

from collections.abc import Sequence

MEMORY = 64
"""Verifications after which the weight of a result has fallen to 1/e: few enough to follow a change of the text within
300 verifications, enough to estimate a share to 0.05 from one request.
"""
LEAST = 1.0
"""The least weight of a depth's results: its share survives a time without drafts, and new results outweigh it."""
PRIOR = 0.5
"""The weight, in results, of the previous depth's share as a prior: a depth without results has the prior's share."""


class Shares:
    """The smoothed share q_i of requests whose i-th draft was accepted, among those with all earlier drafts accepted.

    i is 1 to `deepest`. Verifications of all batch sizes count, each in the order of its completion.
    """

    def __init__(self, deepest: int) -> None:
        self._tried, self._accepted = [0.0] * deepest, [0.0] * deepest

    def count(self, depth: int, accepted: Sequence[int]) -> None:
        """Count a verification of `depth` drafts a request. `accepted` has each request's number, 0 to `depth`."""
        for place, tried in enumerate(self._tried):
            if tried > LEAST:
                kept = max(1 - 1 / MEMORY, LEAST / tried)
                self._tried[place] *= kept
                self._accepted[place] *= kept
        if depth == 0:
            return
        ended = [0] * (depth + 1)
        for number in accepted:
            ended[number] += 1
        tried = len(accepted)
        for place in range(depth):
            self._tried[place] += tried
            tried -= ended[place]
            self._accepted[place] += tried

    @property
    def shares(self) -> list[float]:
        """Return q_1, q_2, ...; a depth that was never drafted has the share of the depth before, and depth 1 has 1."""
        found, before, prior = [], 1.0, 0.0
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            before = (accepted + prior * before) / (tried + prior) if tried else before
            prior = PRIOR
            found.append(before)
        return found

    @property
    def pooled(self) -> float | None:
        """Return the share of all depths together, which estimates one chance for every draft; None before a draft."""
        tried = sum(self._tried)
        return sum(self._accepted) / tried if tried else None

    def expect(self) -> list[float]:
        """Return the mean tokens that a request gets from a verification of 0, 1, ... drafts; each is at least 1."""
        tokens, chance, found = 1.0, 1.0, [1.0]
        for share in self.shares:
            chance *= share
            tokens += chance
            found.append(tokens)
        return found
