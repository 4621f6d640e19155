"""A simulated MoE layer with paged experts."""

from dataclasses import replace

import torch
from sglang.srt.layers.moe.paged_experts.residency import LRUPolicy, plan_waves

from sglang_xshare import Batch, Router, Selection, SelectionPlan, select


class PagedLayer:
    """An MoE layer with page slots. Calling it selects experts for one step and updates the slots.

    As in SGLang, a new expert replaces the least recently used one, and experts that do not fit run in several waves.
    At the start, the slots contain the experts with the lowest numbers.

    - `page_ins`: the number of experts that were loaded in each step.
    - `page_ins_before`: the number of experts that the model's own routing would have loaded in each step, from the
      same slots.
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
