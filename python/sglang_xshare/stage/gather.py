"""Servers whose ranks each route rows of their own (all-to-all expert parallelism), and the rows of all of them."""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ..upstream.ranks import all_gather


@dataclass(frozen=True)
class Ranks:
    """The tensor-parallel ranks of such a server, seen from rank `rank` of `size`. `share` neighbours have the same
    requests, and divide their rows evenly, in order. `together` says that they select among the rows of all.
    """

    rank: int
    size: int
    share: int
    num_experts: int
    together: bool

    def divide(self, counts: list[int]) -> tuple[int, ...]:
        """Router rows of every rank, from what each attention rank was padded to. Raises RuntimeError where these are
        not all, or do not divide.
        """
        if len(counts) * self.share != self.size or any(count % self.share for count in counts):
            raise RuntimeError(
                f"{counts} rows on {self.size} ranks, {self.share} of which share requests: an expert policy needs the "
                f"rows of every rank of data-parallel attention, allowed are multiples of {self.share}"
            )
        return tuple(count // self.share for count in counts for _ in range(self.share))

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's part of [rows, ...] that its neighbours have too."""
        return rows.tensor_split(self.share)[self.rank % self.share]


@dataclass(frozen=True)
class Gather:
    """The rows of one step on each rank, padding included, from rank `rank`. All call `collect` in the same order."""

    rows_by_rank: tuple[int, ...]
    rank: int

    @property
    def own(self) -> int:
        """Rows of this rank."""
        return self.rows_by_rank[self.rank]

    def collect(self, own: torch.Tensor) -> torch.Tensor:
        """[rows of all ranks, ...] float32, rank after rank; of one that hands in none (padding alone), zeros."""
        # Ranks without rows do not know of which type the others' are, and a collective takes equal shapes.
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
        """This rank's own, `rows` many, of what was found for all."""
        return gathered.narrow(0, sum(self.rows_by_rank[: self.rank]), rows)
