"""Whether ranks that route the same rows have selected the same experts: a checksum of them all, compared at times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from ...upstream.ranks import all_gather
from ..gather import Ranks

EVERY = 1024
"""Forwards between two comparisons, see `is_due`."""
_TURN = 6364136223846793005
"""What the checksum is multiplied by in each step (Knuth's, of MMIX), so that the order of steps matters."""


def is_due(forwards: int) -> bool:
    """Whether it is time for what is done every so many forwards, and at powers of two before: a wrong setup shows."""
    return not (forwards % EVERY and forwards & (forwards - 1))


class Agreement:
    """Adds up on the device which experts every layer has active in every step, in three small operations a step, and
    compares what `size` tensor-parallel ranks have: one collective of eight bytes a rank, and the one of its steps that
    the host waits for. What it finds is alike on all ranks, after the same forward.

    `gather` makes [size] of the [1] of every rank, in their order.
    """

    def __init__(
        self, size: int, device: str, gather: Callable[[torch.Tensor, int], torch.Tensor] = all_gather
    ) -> None:
        self.size = size
        self.forwards = 0
        """Forwards since the last switch. Ranks have done as many, or would wait for each other forever."""
        self._gather = gather
        self._checksum = torch.zeros(1, dtype=torch.int64, device=device)
        self._turn = torch.full_like(self._checksum, _TURN)
        self._weights: torch.Tensor | None = None
        self.counts: Counter[str] = Counter()
        """Of the server: comparisons, ranks that selected otherwise in one, and switches to vanilla because of that."""

    def count(self, active: torch.Tensor) -> None:
        """Count one step: which experts were active in every layer, [layers, N] bool, none where it stayed vanilla."""
        if self._weights is None:  # in a run before any capture, and the same on all ranks
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(-(2**63), 2**63 - 1, active.shape, generator=generator)
            self._weights = drawn.to(active.device)
        torch.addcmul(self._weights.where(active, 0).sum(), self._checksum, self._turn, out=self._checksum)

    def end_forward(self, ranks: Ranks | None) -> list[int]:
        """A forward was launched: compare if it is time, unless `ranks` select apart. Returns the ranks that selected
        otherwise than the first.
        """
        self.forwards += 1
        return self.compare() if is_due(self.forwards) and self.compares(ranks) else []

    def compares(self, ranks: Ranks | None) -> bool:
        """Return whether all ranks select the same: `ranks`, of a server whose ranks route their own rows, may not."""
        return self.size > 1 and (ranks is None or ranks.together)

    def compare(self) -> list[int]:
        """Compare all ranks with the first of them, and begin anew. A collective, which the host waits for."""
        first, *_ = checksums = self._gather(self._checksum, self.size).tolist()
        self._checksum.zero_()
        found = [rank for rank, checksum in enumerate(checksums) if checksum != first]
        self.counts.update(comparisons=any(checksums), disagreements=len(found))  # none where nothing was selected
        return found
