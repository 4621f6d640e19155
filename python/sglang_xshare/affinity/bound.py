"""The load bound: which replicas may take one more request."""

from __future__ import annotations

import math
from collections.abc import Sequence

DEFAULT = 1.1


def list_open(loads: Sequence[int], alive: Sequence[int], bound: float) -> list[int]:
    """Those of the replicas `alive` that may take one more request; never none of them.

    With it a replica has at most `bound` times the mean load, the new request counted, or the mean rounded up where
    that is more. While any is idle, only idle ones may: nothing queues behind another while a replica has no work.
    """
    idle = [replica for replica in alive if not loads[replica]]
    if idle:
        return idle
    mean = (sum(loads[replica] for replica in alive) + 1) / len(alive)
    most = max(bound * mean, math.ceil(mean)) + 1e-9  # 1.15 * 20 is just below 23
    return [replica for replica in alive if loads[replica] + 1 <= most]
