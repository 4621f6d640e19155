"""What is counted of a layer, a column each, and flags of layers on the device."""

from functools import cache

import torch

COLUMNS = STEPS, BEFORE, AFTER, KEPT, ROWS, RESCUED, EXACT, PAGED_BEFORE, PAGED, EXCEEDED = range(10)
"""What is counted of a layer. The last three stay 0 where no experts are paged."""
COUNTS = {
    "layer_steps": STEPS,
    "experts_before": BEFORE,
    "experts_after": AFTER,
    "rows": ROWS,
    "rescued": RESCUED,
    "exact_rows": EXACT,
}
PAGING_COUNTS = {"page_ins_before": PAGED_BEFORE, "page_ins": PAGED, "exceeded": EXCEEDED}
"""The columns of an `Interval`'s numbers, of servers that page experts the latter too."""


@cache
def copy_flags(flags: tuple[bool, ...], device: torch.device) -> torch.Tensor:
    """[layers] bool on the device. Copied from the host once, before any capture, and kept for captured graphs."""
    return torch.tensor(flags).to(device)
