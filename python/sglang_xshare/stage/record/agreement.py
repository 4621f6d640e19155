"""A comparison of ranks that route the same rows: a checksum of all experts that each rank has selected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from ...upstream.ranks import all_gather
from ..gather import Ranks

EVERY = 1024
"""The most forwards between two comparisons; see `is_due`."""
_TURN = 6364136223846793005
"""The checksum's factor in each step (from Knuth's MMIX), which makes the order of steps matter."""


def is_due(forwards: int) -> bool:
    """Return whether a comparison is due: at multiples of `EVERY` and powers of two, so a wrong setup shows soon."""
    return not (forwards % EVERY and forwards & (forwards - 1))


class Agreement:
    """The checksum of all active experts, and its comparison across `size` tensor-parallel ranks.

    The checksum covers every layer and step, and is added up on the device in three small operations a step. A
    comparison is a collective of eight bytes a rank, for which the host waits. All ranks find the same result after the
    same forward.

    `gather` makes a tensor [size] from the [1] of each rank, in the order of the ranks.
    """

    def __init__(
        self, size: int, device: str, gather: Callable[[torch.Tensor, int], torch.Tensor] = all_gather
    ) -> None:
        self.size = size
        self.forwards = 0
        """Forwards since the last `begin`: the same number on all ranks, or ranks would wait for each other forever."""
        self._gather = gather
        self._checksum = torch.zeros(1, dtype=torch.int64, device=device)
        self._turn = torch.full_like(self._checksum, _TURN)
        self._weights: torch.Tensor | None = None
        self.counts: Counter[str] = Counter()
        """Counts since `take_counts`: comparisons, ranks that differed, and switches to vanilla for this reason."""

    def count(self, active: torch.Tensor) -> None:
        """Add the experts of a step to the checksum: `active` [layers, N] bool, none in a layer that stayed vanilla."""
        if self._weights is None:  # drawn in a step before any capture, equal on all ranks
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(-(2**63), 2**63 - 1, active.shape, generator=generator)
            self._weights = drawn.to(active.device)
        torch.addcmul(self._weights.where(active, 0).sum(), self._checksum, self._turn, out=self._checksum)

    def end_forward(self, ranks: Ranks | None) -> list[int]:
        """Count a launched forward. If a comparison is due, return the ranks that differ from the first, else []."""
        self.forwards += 1
        return self.compare() if is_due(self.forwards) and self.compares(ranks) else []

    def take_counts(self) -> Counter[str]:
        """Return the counts since the last call."""
        counts, self.counts = self.counts, Counter()
        return counts

    def compares(self, ranks: Ranks | None) -> bool:
        """Return whether all ranks must select the same experts: not if each of `ranks` selects among its own rows."""
        return self.size > 1 and (ranks is None or ranks.together)

    def begin(self) -> None:
        """Start anew, so the next plans are compared soon, without the steps of the former plans.

        Every rank must call `begin` after the same forward, also a rank that then fails to switch.
        """
        self.forwards = 0
        self._checksum.zero_()

    def compare(self) -> list[int]:
        """Return the ranks that differ from the first, and reset the checksum. A collective: the host waits."""
        first, *_ = checksums = self._gather(self._checksum, self.size).tolist()
        self._checksum.zero_()
        found = [rank for rank, checksum in enumerate(checksums) if checksum != first]
        # A comparison counts only if something was selected.
        self.counts.update(comparisons=any(checksums), disagreements=len(found))
        return found
