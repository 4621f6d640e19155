"""Active experts and page-ins a layer and step, from selection itself on drawn logits: it needs torch."""

import torch

from ..compatibility.moe_model import MoeModel
from ..policies import VANILLA
from ..policies.plan import SelectionPlan
from ..policies.schedule import Schedule
from ..selection import select
from ..types import Batch, Router
from .loads import Drawn, Load

LAYERS = 48
"""Layers drawn for a mean, a step of each."""
PAGED_LAYERS, STEPS, COLD = 4, 48, 8
"""The same where experts are paged: steps of each layer, the first of which fill the slots and do not count."""


def draw_loads(
    schedule: Schedule | None,
    model: MoeModel,
    rows: int,
    tokens_per_request: int,
    common: float,
    ranks: int = 1,
    slots: int | None = None,
) -> Drawn:
    """Select from drawn logits, `common` as `COMMON`, by the model itself where `schedule` is None; experts lie on the
    ranks as many each, in order. With `slots` for some of a layer's experts, page-ins are counted: of the model itself
    and of the policy, each from its own slots.

    The logits of a layer are normal, a part of them the same for all rows and steps; the router renormalizes. Raises
    ValueError for a plan that the model does not fit.
    """
    generator = torch.Generator().manual_seed(0)
    batch = Batch(tokens_per_request=tokens_per_request)
    layers, steps, cold = (LAYERS, 1, 0) if slots is None else (PAGED_LAYERS, STEPS, COLD)
    counts = []
    for layer in range(layers):
        plan = schedule.plan(layer * model.num_layers // layers, rows) if schedule else None
        sides = [_Layer(one, model, batch, ranks, slots) for one in (VANILLA, plan or VANILLA)]
        shared = torch.randn(1, model.num_experts, generator=generator)
        for step in range(steps):
            own = torch.randn(rows, model.num_experts, generator=generator)
            logits = common**0.5 * shared + (1 - common) ** 0.5 * own
            found = [side.step(logits) for side in sides]
            if step >= cold:
                counts.append(found)
    before, after = torch.tensor(counts, dtype=torch.float64).mean(0).tolist()
    return Drawn(_name(before, slots), _name(after, slots), after[-1])


def _name(counts: list[float], slots: int | None) -> Load:
    active, fullest, page_ins, _ = counts
    return Load(active, fullest, None if slots is None else page_ins)


class _Layer:
    """One layer under one plan, step after step, with what its slots hold: the experts used last."""

    def __init__(self, plan: SelectionPlan, model: MoeModel, batch: Batch, ranks: int, slots: int | None) -> None:
        self.plan, self.batch, self.ranks, self.slots = plan, batch, ranks, slots
        self.router = Router(top_k=model.top_k, scoring=model.scoring)
        self.rank_of_expert = torch.arange(model.num_experts) * ranks // model.num_experts
        self.used = -torch.arange(model.num_experts, dtype=torch.float64)
        self.steps = 0

    def step(self, logits: torch.Tensor) -> tuple[float, float, float, float]:
        """Select from logits [rows, experts]: (active experts, those of the fullest rank, page-ins, kept mass)."""
        resident, batch = torch.ones_like(self.used, dtype=torch.bool), self.batch
        if self.slots is not None:
            resident = torch.zeros_like(resident)
            resident[self.used.topk(self.slots).indices] = True
            batch = Batch(tokens_per_request=batch.tokens_per_request, resident=resident, slots=self.slots)
        out = select(logits, self.plan, self.router, batch, self.rank_of_expert, backend="torch")
        missing = out.active & ~resident
        self.steps += 1
        self.used[out.active] = self.steps  # what was loaded already goes through the layer first
        self.used[missing] += 0.5
        by_rank = torch.bincount(self.rank_of_expert[out.active], minlength=self.ranks)
        return float(by_rank.sum()), float(by_rank.max()), float(missing.sum()), float(out.kept_mass.mean())
