"""What is counted of a layer, a column each; flags of layers on the device, and tables of what selections found."""

from __future__ import annotations

from functools import cache

import torch

from ...types import Tally

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
def mark(flags: tuple[bool, ...], device: torch.device) -> torch.Tensor:
    """[layers] bool. Copied from the host once, in a run before any capture, and kept for captured graphs."""
    return torch.tensor(flags).to(device)


def allocate_tables(layers: int, logits: torch.Tensor) -> Tally:
    """The `Tally` of every layer, as tensors [layers, ...], for a step in which each routes logits [n, N] so."""
    rows, experts = logits.shape
    return Tally(
        active=logits.new_empty((layers, experts), dtype=torch.bool),
        vanilla_active=logits.new_empty((layers, experts), dtype=torch.bool),
        kept_mass=logits.new_empty((layers, rows), dtype=torch.float32),
        rescued=logits.new_empty((layers,), dtype=torch.int64),
    )
