"""Made-up router logits of the shape of DeepSeek-R1, fitted to XShare's Table 2, and policies on them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from sglang_xshare import Batch, Router, SelectionPlan, select

EXPERTS, TOP_K, RANKS = 256, 8, 8
ROUTER = Router(TOP_K, scoring="sigmoid", num_expert_group=RANKS, topk_group=RANKS // 2)
RANK_OF_EXPERT = torch.arange(EXPERTS) // (EXPERTS // RANKS)
"""Each rank holds one of the router's groups."""


@dataclass(frozen=True)
class Batches:
    """Batches of `rows` rows of router logits: Gaussian with variance 1, in part common to the rows of a batch.

    The common part is `by_expert`² for each expert and `by_rank`² for each rank. On a grid of
    both, these values bring vanilla routing nearest to `paper`: (active experts, those of the fullest rank).
    """

    rows: int
    by_expert: float
    by_rank: float
    paper: tuple[float, float]

    def draw(self, count: int, seed: int = 0) -> Iterator[torch.Tensor]:
        """Yield `count` batches [rows, experts] float32."""
        generator = torch.Generator().manual_seed(seed)
        own = (1 - self.by_expert**2 - self.by_rank**2) ** 0.5
        for _ in range(count):
            expert = torch.randn(EXPERTS, generator=generator)
            rank = torch.randn(RANKS, generator=generator)[RANK_OF_EXPERT]
            rows = torch.randn(self.rows, EXPERTS, generator=generator)
            yield self.by_expert * expert + self.by_rank * rank + own * rows


# The paper's second row is 16 requests, which cannot have 160 active experts at top-8; 32 rows can.
FITTED = {
    batches.rows: batches for batches in (Batches(8, 0.44, 0.12, (50.7, 11.3)), Batches(32, 0.06, 0.08, (160.4, 25.6)))
}
LEAST_SHARE = 0.05
"""The share of rows, those with the least kept mass, that have a figure of their own."""


def measure_plans(plans: Sequence[SelectionPlan], batches: Batches, count: int) -> dict[str, Any]:
    """Return means over `count` batches, plans in turn, and the standard error of the fullest rank's experts."""
    active, fullest, kept = [], [], []
    for number, logits in enumerate(batches.draw(count)):
        plan = plans[number % len(plans)]
        out = select(logits, plan, ROUTER, Batch(), RANK_OF_EXPERT, backend="torch")
        loads = torch.bincount(RANK_OF_EXPERT[out.active], minlength=RANKS)
        active.append(int(loads.sum()))
        fullest.append(int(loads.max()))
        kept.append(out.kept_mass)
    masses = torch.cat(kept).sort().values
    return {
        "active_experts": fmean(active),
        "fullest_rank": fmean(fullest),
        "fullest_rank_error": float(torch.tensor(fullest).double().std() / count**0.5),
        "kept_mass": float(masses.mean()),
        "least_kept_mass": float(masses[: max(int(len(masses) * LEAST_SHARE), 1)].mean()),
    }
