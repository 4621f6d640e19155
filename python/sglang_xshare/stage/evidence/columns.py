"""What is counted of a layer, a column each, and flags of layers on the device."""

from __future__ import annotations

from functools import cache

import torch

COLUMNS = STEPS, BEFORE, AFTER, KEPT, ROWS, RESCUED, PAGED_BEFORE, PAGED, EXCEEDED = range(9)
"""The last three stay 0 where no experts are paged."""


@cache
def mark(flags: tuple[bool, ...], device: torch.device) -> torch.Tensor:
    """[layers] bool. Copied from the host once, in a run before any capture, and kept for captured graphs."""
    return torch.tensor(flags).to(device)
