"""Ranks that each route their own rows (all-to-all expert parallelism), and the gather of all their rows."""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ..upstream.ranks import all_gather


@dataclass(frozen=True)
class Ranks:
    """The tensor-parallel ranks of a server in which each rank routes its own rows.

    `rank` is the rank of this process, and `size` is the number of ranks. Each group of `share` neighbouring ranks has
    the same requests. The ranks of a group divide the rows of these requests evenly, in order. If `together` is True,
    each rank selects experts for the rows of all ranks. Otherwise each rank selects experts for its own rows.
    """

    rank: int
    size: int
    share: int
    num_experts: int
    together: bool

    def divide(self, counts: list[int]) -> tuple[int, ...]:
        """Return the number of router rows on each rank.

        `counts` contains the number of rows of each attention rank, including padding rows. Raises RuntimeError if
        `counts` lacks a rank, or if the rows cannot be divided evenly.
        """
        if len(counts) * self.share != self.size or any(count % self.share for count in counts):
            raise RuntimeError(
                f"rows of the ranks of data-parallel attention must be {self.size // self.share} multiples of "
                f"{self.share} (got {counts}): an expert policy on {self.size} ranks divides the rows of each"
            )
        return tuple(count // self.share for count in counts for _ in range(self.share))

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of `rows` [rows, ...]. The other ranks of its group have the other parts."""
        return rows.tensor_split(self.share)[self.rank % self.share]


def name_rows(ranks: Ranks | None) -> str:
    """Return the value of the policy's key `rows`: "rank" if each rank selects for its own rows, else "batch"."""
    return "batch" if ranks is None or ranks.together else "rank"


@dataclass(frozen=True)
class Gather:
    """The number of rows of each rank in one step, including padding rows.

    All ranks must call `collect` in the same order.
    """

    rows_by_rank: tuple[int, ...]
    rank: int

    @property
    def own(self) -> int:
        """The number of this rank's rows."""
        return self.rows_by_rank[self.rank]

    def collect(self, own: torch.Tensor) -> torch.Tensor:
        """Gather the rows of all ranks in the order of the ranks. Return float32 [rows of all ranks, ...].

        A rank with only padding rows may pass no rows. The result then contains zeros for this rank.
        """
        # All ranks send float32, because a rank without rows cannot infer the dtype of the other ranks. All ranks pad
        # to the same number of rows, because a collective needs equal shapes.
        longest = max(self.rows_by_rank)
        own = own.float().contiguous()
        if len(own) < longest:
            own = pad(own, (*(0, 0) * (own.dim() - 1), 0, longest - len(own)))
        gathered = all_gather(own, len(self.rows_by_rank))
        if sum(self.rows_by_rank) == len(gathered):
            return gathered
        parts = gathered.split(longest)
        return torch.cat([part[:rows] for part, rows in zip(parts, self.rows_by_rank, strict=True)])

    def keep(self, gathered: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the part of `gathered` for this rank's rows. `rows` is the number of this rank's rows."""
        return gathered.narrow(0, sum(self.rows_by_rank[: self.rank]), rows)
