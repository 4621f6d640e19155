"""A layer whose experts are paged into slots: what each step pages in and evicts, and what selection is told of it."""

from dataclasses import replace
from typing import Protocol

import torch
from sglang.srt.layers.moe.paged_experts.residency import LRUPolicy, plan_waves

from sglang_xshare import Batch, Router, Selection, SelectionPlan, select

MEMORY = 0.9
"""What a step leaves of a running mean."""


class Slots(Protocol):
    """Which experts are loaded: as many as there are slots, at first the lowest-numbered."""

    def list_residents(self) -> list[int]:
        """The experts in slots."""

    def page_in(self, active: torch.Tensor, utility: torch.Tensor) -> None:
        """Load a step's `active` [N] bool experts; `utility` [N] is their rows', as the model routes them."""


class Recency:
    """Upstream's own: what was used least recently is evicted, and what does not fit runs in waves."""

    def __init__(self, slots: int, num_experts: int) -> None:
        self._policy = LRUPolicy(slots)

    def list_residents(self) -> list[int]:
        return list(self._policy.resident)

    def page_in(self, active: torch.Tensor, utility: torch.Tensor) -> None:
        plan_waves(self._policy, active.nonzero().flatten().tolist())


class RunningMean:
    """What has the smallest running mean of utility is evicted; where not all that is active fits, of that too."""

    def __init__(self, slots: int, num_experts: int) -> None:
        self._slots = slots
        self._mean = torch.zeros(num_experts)
        self._resident = torch.arange(num_experts) < slots

    def list_residents(self) -> list[int]:
        return self._resident.nonzero().flatten().tolist()

    def page_in(self, active: torch.Tensor, utility: torch.Tensor) -> None:
        self._mean = MEMORY * self._mean + (1 - MEMORY) * utility
        standing = self._mean.masked_fill(~(self._resident | active), -1.0)
        if active.sum() <= self._slots:
            standing[active] = torch.inf
        kept = standing.topk(self._slots).indices
        self._resident = torch.zeros_like(self._resident).index_fill(0, kept, True)


EVICTIONS: dict[str, type[Recency] | type[RunningMean]] = {"recency": Recency, "mean": RunningMean}


class PagedLayer:
    """Selects as `sglang_xshare.select` does, step after step, and knows which experts the steps before have left in
    the slots. `page_ins` and `page_ins_before`: of each step, what was paged in, and what the model's own routing would
    have paged in from the same state.
    """

    def __init__(self, slots: int, num_experts: int, eviction: str) -> None:
        self.slots = slots
        self.page_ins: list[int] = []
        self.page_ins_before: list[int] = []
        self._kept: Slots = EVICTIONS[eviction](slots, num_experts)

    def __call__(self, logits: torch.Tensor, plan: SelectionPlan, router: Router, batch: Batch) -> Selection:
        resident = torch.zeros(logits.shape[1], dtype=torch.bool)
        resident[self._kept.list_residents()] = True
        found = select(logits, plan, router, replace(batch, resident=resident, slots=self.slots))
        self.page_ins.append(int((found.active & ~resident).sum()))
        self.page_ins_before.append(int((found.vanilla_active & ~resident).sum()))
        self._kept.page_in(found.active, _sum_shares(logits, router))
        return found


def _sum_shares(logits: torch.Tensor, router: Router) -> torch.Tensor:
    """[N]: the rows' softmax scores, normalized within each one's own top-k, summed."""
    best = logits.float().topk(router.top_k)
    return torch.zeros(logits.shape[1]).index_add(0, best.indices.flatten(), best.values.softmax(1).flatten())
