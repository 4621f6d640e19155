"""A check that all ranks select the same experts for the same rows. The ranks compare checksums of their selections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from ...upstream.ranks import all_gather
from ..gather import Ranks

EVERY = 1024
"""The maximum number of forwards between two comparisons. See `is_due`."""
_TURN = 6364136223846793005
"""Each step multiplies the checksum by this factor (from Knuth's MMIX), so the checksum depends on the order of steps.
"""


def is_due(forwards: int) -> bool:
    """Return whether a comparison is due after this number of forwards.

    A comparison is due at each multiple of `EVERY`. It is also due at powers of two, so a wrong setup is found soon
    after the start.
    """
    return not (forwards % EVERY and forwards & (forwards - 1))


class Agreement:
    """A checksum of all active experts, which tensor-parallel ranks compare.

    The checksum covers every layer and step. The device updates it with three small operations in each step. A
    comparison is a collective of eight bytes for each rank, and the host waits for it. All ranks compare after the same
    forward, and get the same result.

    `size` is the number of ranks. `gather` takes a tensor [1] on each rank, and returns a tensor [size] in the order of
    the ranks.
    """

    def __init__(
        self, size: int, device: str, gather: Callable[[torch.Tensor, int], torch.Tensor] = all_gather
    ) -> None:
        self.size = size
        self.forwards = 0
        """The number of forwards since the last call of `begin`. It must be equal on all ranks, because otherwise ranks
        would wait for each other forever.
        """
        self._gather = gather
        self._checksum = torch.zeros(1, dtype=torch.int64, device=device)
        self._turn = torch.full_like(self._checksum, _TURN)
        self._weights: torch.Tensor | None = None
        self.counts: Counter[str] = Counter()
        """The counts since the last call of `take_counts`: comparisons, ranks that differed, and switches to vanilla
        because ranks differed.
        """

    def count(self, active: torch.Tensor) -> None:
        """Add the active experts of a step to the checksum.

        `active` is a bool tensor [layers, N]. It is False for all experts of a layer that stayed vanilla.
        """
        if self._weights is None:  # drawn before any capture, with the same seed on all ranks
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(-(2**63), 2**63 - 1, active.shape, generator=generator)
            self._weights = drawn.to(active.device)
        torch.addcmul(self._weights.where(active, 0).sum(), self._checksum, self._turn, out=self._checksum)

    def end_forward(self, ranks: Ranks | None) -> list[int]:
        """Count a launched forward, and compare the ranks if a comparison is due.

        Return the ranks whose checksum differs from the first rank's checksum. Without a comparison the list is empty.
        """
        self.forwards += 1
        return self.compare() if is_due(self.forwards) and self.compares(ranks) else []

    def take_counts(self) -> Counter[str]:
        """Return the counts since the last call, and reset them."""
        counts, self.counts = self.counts, Counter()
        return counts

    def compares(self, ranks: Ranks | None) -> bool:
        """Return whether all ranks must select the same experts.

        Ranks may select different experts if each rank selects among its own rows.
        """
        return self.size > 1 and (ranks is None or ranks.together)

    def begin(self) -> None:
        """Reset the checksum and the number of forwards.

        After that, the next comparison is due soon, and it covers no earlier step. Every rank must call `begin` after
        the same forward, even if the rank then fails to switch.
        """
        self.forwards = 0
        self._checksum.zero_()

    def compare(self) -> list[int]:
        """Return the ranks whose checksum differs from the first rank's checksum. Reset the checksum.

        This is a collective, and the host waits for it.
        """
        first, *_ = checksums = self._gather(self._checksum, self.size).tolist()
        self._checksum.zero_()
        found = [rank for rank, checksum in enumerate(checksums) if checksum != first]
        # A comparison is counted only if some rank has selected experts.
        self.counts.update(comparisons=any(checksums), disagreements=len(found))
        return found
