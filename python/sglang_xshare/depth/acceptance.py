"""The estimate for `acceptance` "auto" when the draft depth changes."""

from typing import Any

from ..stage.acceptance import GRID, Acceptance
from .shares import Shares


class PooledAcceptance(Acceptance):
    """The chance that a draft is accepted if all earlier drafts were, over all depths: `Shares.pooled`.

    Unlike the mean accepted length, the chance does not depend on the depths that the server used.
    """

    def __init__(self, shares: Shares, deepest: int) -> None:
        super().__init__(deepest + 1)
        self._shares = shares

    def count(self, req: Any) -> None:
        """Do nothing: `ThroughputPolicy` counts the verifications."""

    def read(self) -> float:
        """Return the chance, a multiple of 1 / 64; before the first draft, the former estimate."""
        pooled = self._shares.pooled
        return self.number if pooled is None else find_nearest(pooled)


def find_nearest(chance: float) -> float:
    """Return the multiple of 1 / 64 from 1 / 64 to 63 / 64 that is nearest to `chance`."""
    return min(GRID, key=lambda one: abs(one - chance))
