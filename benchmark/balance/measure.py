"""What policies make of batches of logits: experts of the fullest rank, active experts, kept mass."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

from benchmark.balance.logits import RANK_OF_EXPERT, RANKS, ROUTER, Batches
from sglang_xshare import Batch, SelectionPlan, select

LEAST_SHARE = 0.05
"""The share of rows, those with the least kept mass, that have a figure of their own."""


def measure_plans(plans: Sequence[SelectionPlan], batches: Batches, count: int) -> dict[str, Any]:
    """Means over `count` batches, which the plans take in turn, as layers would: active experts, those of the fullest
    rank with its standard error, kept mass of all rows, and of the rows with least.
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
