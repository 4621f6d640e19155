"""Servers whose ranks each route their own rows (all-to-all expert parallelism), and the gather of all rows."""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ..upstream.ranks import all_gather


@dataclass(frozen=True)
class Ranks:
    """The tensor-parallel ranks of a server whose ranks each route their own rows, seen from rank `rank` of `size`.

    `share` neighbouring ranks have the same requests, and divide the rows evenly, in order. With `together` each rank
    selects among the rows of all ranks.
    """

    rank: int
    size: int
    share: int
    num_experts: int
    together: bool

    def divide(self, counts: list[int]) -> tuple[int, ...]:
        """Return the router rows of every rank, from `counts`, the padded rows of each attention rank.

        Raises RuntimeError if `counts` lacks a rank, or if its rows cannot be divided evenly.
        """
        if len(counts) * self.share != self.size or any(count % self.share for count in counts):
            raise RuntimeError(
                f"rows of the ranks of data-parallel attention must be {self.size // self.share} multiples of "
                f"{self.share} (got {counts}): an expert policy on {self.size} ranks divides the rows of each"
            )
        return tuple(count // self.share for count in counts for _ in range(self.share))

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of `rows` [rows, ...], which neighbouring ranks divide."""
        return rows.tensor_split(self.share)[self.rank % self.share]


def name_rows(ranks: Ranks | None) -> str:
    """Return the policy's key `rows` for these ranks: "rank" if each rank selects by itself, else "batch"."""
    return "batch" if ranks is None or ranks.together else "rank"


@dataclass(frozen=True)
class Gather:
    """The rows of one step on each rank, padding included. All ranks must call `collect` in the same order."""

    rows_by_rank: tuple[int, ...]
    rank: int

    @property
    def own(self) -> int:
        """The number of this rank's rows."""
        return self.rows_by_rank[self.rank]

    def collect(self, own: torch.Tensor) -> torch.Tensor:
        """Return [rows of all ranks, ...] float32, rank after rank; zeros for a rank that has only padding rows."""
        # Sent as float32, because a rank without rows cannot infer the others' dtype, and padded, because a collective
        # takes equal shapes.
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
        """Return this rank's `rows` rows of a result for the rows of all ranks."""
        return gathered.narrow(0, sum(self.rows_by_rank[: self.rank]), rows)
