"""A layer whose experts are paged into slots: the page-ins of each step, and the residents that selection prefers."""

from dataclasses import replace

import torch
from sglang.srt.layers.moe.paged_experts.residency import LRUPolicy, plan_waves

from sglang_xshare import Batch, Router, Selection, SelectionPlan, select


class PagedLayer:
    """Selects as `sglang_xshare.select` does, step after step, with the experts that are in the slots.

    As in upstream, the least recently used expert is evicted, and experts that do not fit run in waves. At first the
    slots hold the lowest-numbered experts. `page_ins` and `page_ins_before`: of each step, the experts paged in, and
    those that the model's own routing would have paged in from the same state.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.page_ins: list[int] = []
        self.page_ins_before: list[int] = []
        self._kept = LRUPolicy(slots)

    def __call__(self, logits: torch.Tensor, plan: SelectionPlan, router: Router, batch: Batch) -> Selection:
        resident = torch.zeros(logits.shape[1], dtype=torch.bool)
        resident[list(self._kept.resident)] = True
        found = select(logits, plan, router, replace(batch, resident=resident, slots=self.slots))
        self.page_ins.append(int((found.active & ~resident).sum()))
        self.page_ins_before.append(int((found.vanilla_active & ~resident).sum()))
        plan_waves(self._kept, found.active.nonzero().flatten().tolist())
        return found
