"""Batches small enough to work out by hand, selections on them, and schedules of keys."""

import math
from typing import Any

import torch

from sglang_xshare import select
from sglang_xshare.policies.schedule import Schedule, build_schedule


def build(name: str = "xshare", speculative: bool = False, **config: Any) -> Schedule:
    schedule = build_schedule(name, config, speculative)
    assert schedule is not None
    return schedule


def choose(*call, **keys):
    """Return the reference's selection, of which the other backends have the same ids and S."""
    found = select(*call, **keys, backend="reference")
    for backend in ("torch", "auto"):
        other = select(*call, **keys, backend=backend)
        assert torch.equal(other.topk_ids, found.topk_ids)
        assert torch.equal(other.selected, found.selected)
    return found


def logits_of(*rows):
    """Logits whose softmax is in the proportions given."""
    return torch.tensor([[math.log(score) if score else -math.inf for score in row] for row in rows])


# Top-2 shares: row 0 gives 0.6 to expert 0, 0.4 to 1; row 1 gives 0.7 to 3, 0.3 to 2; row 2 gives 0.5 each to 1 and 4.
BATCH = logits_of([6, 4, 1, 1, 1, 1], [1, 1, 3, 7, 1, 1], [1, 5, 1, 1, 5, 1])
