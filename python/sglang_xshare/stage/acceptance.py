"""An estimate of the chance that a draft is accepted, for policies with `acceptance` "auto"."""

import logging
from collections.abc import Callable
from typing import Any

from ..policies.plan import MOST_LIKELY
from .record.agreement import is_due

FIRST = 64
"""When a server starts, its counts contain this number of verifications, with all drafts accepted. So the first real
verifications lower the estimate slowly: a few verifications prove nothing, and an estimate that is too high is safe
(benchmark/quality).
"""
MEMORY = 8192
"""The maximum number of counted verifications. Above this number, all counts are halved to follow the traffic."""
MUCH = 1 / 8
"""The smallest change of the estimate that is logged."""
GRID = [count / 64 for count in range(63, 0, -1)]
"""The values that an estimate can have."""

logger = logging.getLogger(__name__)


class Acceptance:
    """The estimate of one scheduler, from the accepted drafts of its requests.

    `width` is the maximum number of tokens that a request gets from a verify step: all drafts of a chain or of one path
    of a tree, plus one. `width` is 1 without speculative decoding. The host counts the drafts, and all ranks have the
    same estimate after the same forward.

    If the server changes the draft depth, requests are not counted, because the mean accepted length depends on the
    depth. Instead `find_share` returns the share of accepted drafts among the drafts whose predecessors were all
    accepted, or None if there was no draft yet.
    """

    def __init__(self, width: int = 1, find_share: Callable[[], float | None] | None = None) -> None:
        self.number = self._logged = MOST_LIKELY
        self.width = width
        self._find_share = find_share
        self._forwards = 0
        self._verified, self._accepted = float(FIRST), float(FIRST * (width - 1))

    @property
    def estimate(self) -> float | None:
        """The estimated chance, or None without drafts."""
        return self.number if self.width > 1 else None

    def count(self, req: Any) -> None:
        """Count the accepted drafts of a request after it has received the result of a forward."""
        if self.width == 1 or self._find_share is not None:
            return
        verified, accepted = getattr(req, "expert_policy_drafts", (0, 0))
        req.expert_policy_drafts = req.spec_verify_ct, req.spec_num_correct_drafts
        self._verified += req.spec_verify_ct - verified
        self._accepted += req.spec_num_correct_drafts - accepted

    def begin_forward(self) -> bool:
        """Update the estimate before a forward, if an update is due. Return whether the estimate has changed."""
        self._forwards += 1
        if not is_due(self._forwards):
            return False
        former, self.number = self.number, self.read()
        if abs(self.number - self._logged) >= MUCH:
            logger.info("Expert policy: drafts accepted with chance %.2f now, %.2f before", self.number, self._logged)
            self._logged = self.number
        return self.number != former

    def read(self) -> float:
        """Return the estimate from the counts so far, or from `find_share` if it is given."""
        if self._find_share is not None:
            share = self._find_share()
            return self.number if share is None else find_nearest(share)
        while self._verified > MEMORY:
            self._verified, self._accepted = self._verified / 2, self._accepted / 2
        return estimate(self._accepted / self._verified, self.width)


def estimate(drafts: float, width: int) -> float:
    """Return the chance that one draft is accepted, from the mean number of accepted drafts.

    `drafts` is this mean number, out of `width` - 1 drafts. A draft is accepted only if all earlier drafts are
    accepted. The chance is a multiple of 1 / 64 from 1 / 64 to 63 / 64.
    """
    return min(GRID, key=lambda chance: abs(_expect(chance, width) - drafts))


def find_nearest(chance: float) -> float:
    """Return the multiple of 1 / 64 from 1 / 64 to 63 / 64 that is nearest to `chance`."""
    return min(GRID, key=lambda one: abs(one - chance))


def _expect(chance: float, width: int) -> float:
    """Return the sum of `chance`, `chance`^2, ... with `width` - 1 terms.

    Only products and sums are used, because all machines round these alike.
    """
    total = 0.0
    for _ in range(width - 1):
        total = chance * (1 + total)
    return total
