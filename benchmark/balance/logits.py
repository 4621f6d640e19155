"""Router logits of a large expert-parallel model, made up: the shape of DeepSeek-R1, fitted to XShare's Table 2."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sglang_xshare import Router

EXPERTS, TOP_K, RANKS = 256, 8, 8
ROUTER = Router(TOP_K, scoring="sigmoid", num_expert_group=RANKS, topk_group=RANKS // 2)
RANK_OF_EXPERT = torch.arange(EXPERTS) // (EXPERTS // RANKS)
"""Each rank holds one of the router's groups."""


@dataclass(frozen=True)
class Batches:
    """Batches of `rows` rows of router logits: Gaussian with variance 1, of which `by_expert`² is common to the rows of
    a batch for each expert, and `by_rank`² for each rank. Both were chosen on a grid so that vanilla routing comes
    nearest to `paper`: (active experts, those of the fullest rank).
    """

    rows: int
    by_expert: float
    by_rank: float
    paper: tuple[float, float]

    def draw(self, count: int, seed: int = 0) -> Iterator[torch.Tensor]:
        """So many batches [rows, experts] float32."""
        generator = torch.Generator().manual_seed(seed)
        own = (1 - self.by_expert**2 - self.by_rank**2) ** 0.5
        for _ in range(count):
            expert = torch.randn(EXPERTS, generator=generator)
            rank = torch.randn(RANKS, generator=generator)[RANK_OF_EXPERT]
            rows = torch.randn(self.rows, EXPERTS, generator=generator)
            yield self.by_expert * expert + self.by_rank * rank + own * rows


# The paper's second row says 16 requests, of which no batch can have 160 active experts; 32 rows can.
FITTED = {
    batches.rows: batches for batches in (Batches(8, 0.44, 0.12, (50.7, 11.3)), Batches(32, 0.06, 0.08, (160.4, 25.6)))
}
