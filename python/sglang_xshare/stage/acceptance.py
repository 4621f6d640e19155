"""How many drafts requests accept: what rows of a verify step are weighed by where `acceptance` is "auto"."""

import logging
from typing import Any

from ..policies.plan import MOST_LIKELY
from .record.agreement import is_due

FIRST = 64
"""Verifications, of which all drafts were accepted, that are taken to have been before the first: a number that is too
large is safe (benchmark/quality), and a few answers prove nothing.
"""
MEMORY = 8192
"""Verifications held at most; where there are more, all count half, so that the number follows the traffic."""
MUCH = 1 / 8
"""A change that the log tells."""
_GRID = [count / 64 for count in range(63, 0, -1)]

logger = logging.getLogger(__name__)


class Acceptance:
    """Estimates the chance of a draft from what a scheduler's requests accept: chains of `width` rows, or trees as
    deep, whose first is always emitted; `width` is 1 without speculation. Counted on the host, alike on all ranks after
    the same forward.
    """

    def __init__(self, width: int = 1) -> None:
        self.number = self._logged = MOST_LIKELY
        self.width = width
        self._forwards = 0
        self._verified, self._accepted = float(FIRST), float(FIRST * (width - 1))

    @property
    def estimate(self) -> float | None:
        """The number, None without drafts."""
        return self.number if self.width > 1 else None

    def count(self, req: Any) -> None:
        """A forward's result has reached a request of upstream's."""
        if self.width == 1:
            return
        verified, accepted = getattr(req, "expert_policy_drafts", (0, 0))
        req.expert_policy_drafts = req.spec_verify_ct, req.spec_num_correct_drafts
        self._verified += req.spec_verify_ct - verified
        self._accepted += req.spec_num_correct_drafts - accepted

    def begin_forward(self) -> bool:
        """A forward is about to be launched: estimate anew where it is time to. Returns whether the number changed."""
        self._forwards += 1
        if not is_due(self._forwards):
            return False
        while self._verified > MEMORY:
            self._verified, self._accepted = self._verified / 2, self._accepted / 2
        former, self.number = self.number, estimate(self._accepted / self._verified, self.width)
        if abs(self.number - self._logged) >= MUCH:
            logger.info("Expert policy: the chance of a draft is %.2f now, %.2f before", self.number, self._logged)
            self._logged = self.number
        return self.number != former


def estimate(drafts: float, width: int) -> float:
    """The chance, a multiple of 1 / 64 from 1 / 64 to 63 / 64, at which each of `width` - 1 drafts is accepted after
    those before, and `drafts` in the mean.
    """
    return min(_GRID, key=lambda chance: abs(_expect(chance, width) - drafts))


def _expect(chance: float, width: int) -> float:
    """chance + chance^2 + ..., `width` - 1 in all. By products and sums alone, which round alike on every machine."""
    total = 0.0
    for _ in range(width - 1):
        total = chance * (1 + total)
    return total
