"""MoEShard's skewed router (section 4.1): experts by lot, some more often than others. For benchmarks alone."""

from dataclasses import dataclass
from typing import Protocol

import torch


class Router(Protocol):
    """Who draws experts for rows."""

    @property
    def experts(self) -> int:
        """How many there are."""

    @property
    def top_k(self) -> int:
        """How many a row gets."""

    def route(self, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids [rows, k] int64, weights [rows, k] float32)."""


@dataclass(frozen=True)
class SkewedRouter:
    """Each row draws `top_k` of `experts` without putting back: the first `skewed` (the paper's k_r) with a weight of
    1 / experts + `alpha`, the others of 1 / experts. With `alpha` 0 all are alike.
    """

    experts: int
    alpha: float
    skewed: int
    top_k: int = 1

    def route(self, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids [rows, k] int64, weights [rows, k] float32, equal and 1 in all)."""
        odds = torch.full((self.experts,), 1 / self.experts)
        odds[: self.skewed] += self.alpha
        generator = torch.Generator().manual_seed(seed)
        ids = torch.multinomial(odds.expand(rows, -1), self.top_k, generator=generator)
        return ids, torch.full((rows, self.top_k), 1 / self.top_k)
