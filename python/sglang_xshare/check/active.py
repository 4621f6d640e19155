"""Active experts a layer and step, from selection itself on drawn logits: it needs torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..compatibility.moe_model import MoeModel
from ..policies import VANILLA
from ..policies.schedule import Schedule
from ..selection import select
from ..types import Batch, Router, Selection
from .loads import Drawn, Load

LAYERS = 48
"""Layers drawn for a mean."""


def draw_loads(
    schedule: Schedule | None,
    model: MoeModel,
    rows: int,
    tokens_per_request: int,
    common: float,
    ranks: int = 1,
) -> Drawn:
    """Select from drawn logits, `common` as `COMMON`, by the model itself where `schedule` is None; experts lie on the
    ranks as many each, in order.

    The logits of a layer are normal, a part of them the same for all rows; the router renormalizes. Raises ValueError
    for a plan that the model does not fit.
    """
    router, batch = Router(top_k=model.top_k, scoring=model.scoring), Batch(tokens_per_request=tokens_per_request)
    rank_of_expert = torch.arange(model.num_experts) * ranks // model.num_experts
    counts, kept = [], []
    for number, logits in enumerate(_draw_logits(model, rows, common)):
        plan = schedule.plan(number % model.num_layers, rows) if schedule else None
        plans = VANILLA, plan or VANILLA
        outs = [select(logits, plan, router, batch, rank_of_expert, backend="torch") for plan in plans]
        counts.append([_count_load(out, rank_of_expert, ranks) for out in outs])
        kept.append(float(outs[1].kept_mass.mean()))
    before, after = torch.tensor(counts, dtype=torch.float64).mean(0).tolist()
    return Drawn(Load(*before), Load(*after), sum(kept) / len(kept))


def _draw_logits(model: MoeModel, rows: int, common: float) -> Iterator[torch.Tensor]:
    """[rows, experts] of each layer."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(LAYERS):
        own = torch.randn(rows, model.num_experts, generator=generator)
        shared = torch.randn(1, model.num_experts, generator=generator)
        yield common**0.5 * shared + (1 - common) ** 0.5 * own


def _count_load(out: Selection, rank_of_expert: torch.Tensor, ranks: int) -> tuple[int, int]:
    """Active experts, and those of the fullest rank."""
    experts = torch.bincount(rank_of_expert[out.active], minlength=ranks)
    return int(experts.sum()), int(experts.max())
