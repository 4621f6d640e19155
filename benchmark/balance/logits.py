"""Random router logits that resemble DeepSeek-R1, and the results of policies on them.

The random distribution is fitted to XShare's Table 2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from sglang_xshare import Batch, Router, SelectionPlan, select

EXPERTS, TOP_K, RANKS = 256, 8, 8
ROUTER = Router(TOP_K, scoring="sigmoid", num_expert_group=RANKS, topk_group=RANKS // 2)
RANK_OF_EXPERT = torch.arange(EXPERTS) // (EXPERTS // RANKS)
"""The rank of each expert. Each rank holds one expert group of the router."""


@dataclass(frozen=True)
class Batches:
    """Batches of random router logits with `rows` rows.

    The logits are Gaussian with variance 1. A part of the variance is common to all rows of a batch: `by_expert`² for
    each expert and `by_rank`² for each rank. Both numbers were chosen from a grid, so that vanilla routing is as close
    as possible to `paper`. `paper` contains the paper's number of active experts, and the number on the fullest rank.
    """

    rows: int
    by_expert: float
    by_rank: float
    paper: tuple[float, float]

    def draw(self, count: int, seed: int = 0) -> Iterator[torch.Tensor]:
        """Yield `count` batches of logits, [rows, experts] float32."""
        generator = torch.Generator().manual_seed(seed)
        own = (1 - self.by_expert**2 - self.by_rank**2) ** 0.5
        for _ in range(count):
            expert = torch.randn(EXPERTS, generator=generator)
            rank = torch.randn(RANKS, generator=generator)[RANK_OF_EXPERT]
            rows = torch.randn(self.rows, EXPERTS, generator=generator)
            yield self.by_expert * expert + self.by_rank * rank + own * rows


# The paper's second row is for 16 requests. With top-8 they activate at most 128 experts, not 160, so 32 rows are used.
FITTED = {
    batches.rows: batches for batches in (Batches(8, 0.44, 0.12, (50.7, 11.3)), Batches(32, 0.06, 0.08, (160.4, 25.6)))
}
LEAST_SHARE = 0.05
"""The share of the rows with the least kept mass. Their mean is reported separately."""


def measure_plans(plans: Sequence[SelectionPlan], batches: Batches, count: int) -> dict[str, Any]:
    """Apply the plans to `count` batches in turn.

    Return the means over all batches, and the standard error of the active experts on the fullest rank.
    """
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
