"""The estimated chance that a draft token is accepted, which policies with `acceptance: "auto"` use."""

import logging
from collections.abc import Callable
from typing import Any

from ..policies.plan import MOST_LIKELY
from .record.agreement import is_due

FIRST = 64
"""When a server starts, its counts already contain this number of verifications whose drafts were all accepted. So the
first real verifications lower the estimate slowly. A few verifications prove little, and an estimate that is too high
is safe (benchmark/quality).
"""
MEMORY = 8192
"""The maximum number of counted verifications. Above it, all counts are halved, so the estimate follows recent traffic.
"""
MUCH = 1 / 8
"""The smallest change of the estimate that the server logs."""
GRID = [count / 64 for count in range(63, 0, -1)]
"""The possible values of the estimate."""

logger = logging.getLogger(__name__)


class Acceptance:
    """The estimated chance that a draft is accepted. Each scheduler has its own estimate for its requests.

    `width` is the maximum number of tokens that a request gets from a verify step. This is the number of drafts in a
    chain, or in one path of a draft tree, plus one. Without speculative decoding, `width` is 1. The host counts the
    drafts. After the same forward, all ranks have the same estimate.

    If the server changes the draft depth, the mean accepted length depends on the depth. Then `follow` replaces the
    counts of the requests' drafts.
    """

    def __init__(self, width: int = 1) -> None:
        self.number = self._logged = MOST_LIKELY
        self.width = width
        self._find_share: Callable[[], float | None] | None = None
        self._forwards = 0
        self._verified, self._accepted = float(FIRST), float(FIRST * (width - 1))

    def follow(self, width: int, find_share: Callable[[], float | None]) -> None:
        """Read the estimate from `find_share`, and count no more drafts.

        `find_share` returns the share of drafts that were accepted, among the drafts whose predecessors were all
        accepted. It returns None before the first draft.
        """
        self.width, self._find_share = width, find_share

    @property
    def estimate(self) -> float | None:
        """The estimated chance, or None without speculative decoding."""
        return self.number if self.width > 1 else None

    def count(self, req: Any) -> None:
        """Count a request's verifications and accepted drafts since the last call for this request."""
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
        """Return a new estimate, from the function that `follow` was given, else from the counts."""
        if self._find_share is not None:
            share = self._find_share()
            return self.number if share is None else find_nearest(share)
        while self._verified > MEMORY:
            self._verified, self._accepted = self._verified / 2, self._accepted / 2
        return estimate(self._accepted / self._verified, self.width)


def estimate(drafts: float, width: int) -> float:
    """Compute, from the mean number of accepted drafts, the chance that one draft is accepted.

    `drafts` is the mean number of accepted drafts in a verification of `width` - 1 drafts. A draft can be accepted only
    if all earlier drafts are accepted. The result is a multiple of 1 / 64, between 1 / 64 and 63 / 64.
    """
    return min(GRID, key=lambda chance: abs(_expect(chance, width) - drafts))


def find_nearest(chance: float) -> float:
    """Round `chance` to a multiple of 1 / 64, between 1 / 64 and 63 / 64."""
    return min(GRID, key=lambda one: abs(one - chance))


def _expect(chance: float, width: int) -> float:
    """Return `chance` + `chance`^2 + ... + `chance`^(`width` - 1).

    The function uses only products and sums, because all machines round them in the same way.
    """
    total = 0.0
    for _ in range(width - 1):
        total = chance * (1 + total)
    return total
