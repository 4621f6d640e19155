"""The shares of draft tokens that the target model accepts, by depth."""

from collections.abc import Sequence

MEMORY = 64
"""The number of verify steps after which the weight of a result has fallen to 1/e. It is small enough to follow a
change of the text within 300 verify steps. It is large enough to estimate a share to 0.05 from one request.
"""
LEAST = 1.0
"""The minimum weight of a depth's old results. A depth therefore keeps its share while it is not used, and new results
still outweigh the old ones.
"""
PRIOR = 0.5
"""The weight of the prior, as a number of results. The prior of a depth is the share of the previous depth. A depth
without results has this share.
"""


class Shares:
    """The smoothed shares q_i of accepted draft tokens, for the depths i from 1 to `deepest`.

    Of all requests whose first i - 1 draft tokens were accepted, q_i is the share whose next draft token was accepted
    too. Verify steps of all batch sizes count, in the order in which they complete.
    """

    def __init__(self, deepest: int) -> None:
        self._tried, self._accepted = [0.0] * deepest, [0.0] * deepest

    def count(self, depth: int, accepted: Sequence[int]) -> None:
        """Count a verify step with `depth` draft tokens for each request.

        `accepted` contains the number of accepted draft tokens of each request, from 0 to `depth`.
        """
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
        """Return the list of shares q_1, q_2, and so on.

        A depth that was never used has the share of the previous depth. For depth 1, this share is 1.
        """
        found, before, prior = [], 1.0, 0.0
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            before = (accepted + prior * before) / (tried + prior) if tried else before
            prior = PRIOR
            found.append(before)
        return found

    @property
    def pooled(self) -> float | None:
        """Return the share of accepted draft tokens over all depths, or None before the first draft token.

        This share is an estimate of the chance of acceptance, if the chance is the same for every draft token.
        """
        tried = sum(self._tried)
        return sum(self._accepted) / tried if tried else None

    def expect(self) -> list[float]:
        """Return the mean number of tokens that a request gets from a verify step.

        The list has a value for each number of draft tokens, from 0 on. Each value is at least 1.
        """
        tokens, chance, found = 1.0, 1.0, [1.0]
        for share in self.shares:
            chance *= share
            tokens += chance
            found.append(tokens)
        return found
