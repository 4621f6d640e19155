"""Selection with numbers that changed after the kernel was chosen, for the interpreter's process."""

import torch

from sglang_xshare import Batch, Router, Selection, SelectionPlan
from sglang_xshare.selection.triton_kernel import launch
from sglang_xshare.selection.triton_kernel.budgets import Budgets


def select_live(
    logits: torch.Tensor, plans: list[SelectionPlan], router: Router, batch: Batch, ranks: torch.Tensor | None = None
) -> list[Selection]:
    """Route by the kernel of the first plan, in turn with the numbers of each, written where it reads them."""
    budgets = Budgets(plans[0], logits.device)
    found = []
    for plan in plans:
        budgets.write(plan)
        found.append(launch.select(logits, plans[0], router, batch, ranks, None, budgets))
    return found
