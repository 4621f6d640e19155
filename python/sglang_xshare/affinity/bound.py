"""The load bound: which replicas may take one more request, and what that costs."""

import math
from collections.abc import Sequence

DEFAULT = 1.175
"""The widest, of steps of 0.025, with which the load imbalance stayed below 1.1 in the mean over all traffic of
benchmark/README.md, at 2, 4 and 8 replicas.
"""


def list_open(loads: Sequence[int], alive: Sequence[int], bound: float) -> list[int]:
    """Those of the replicas `alive` that may take one more request; never none of them.

    With it a replica has at most `bound` times the mean load, the new request counted, or the mean rounded up where
    that is more. While any is idle, only idle ones may: nothing queues behind another while a replica has no work.
    """
    idle = [replica for replica in alive if not loads[replica]]
    if idle:
        return idle
    mean = _mean(loads, alive)
    most = max(bound * mean, math.ceil(mean)) + 1e-9  # 1.15 * 20 is just below 23
    return [replica for replica in alive if loads[replica] + 1 <= most]


def price_load(loads: Sequence[int], alive: Sequence[int], bound: float) -> list[float]:
    """What one more request on each replica costs, in similarity: nothing up to the mean load rounded up, from there on
    in proportion, and 1 at the bound, where the most similar replica is worth no more than one of similarity 0.

    At an equal imbalance fewer experts are active than under a bound alone: in the simulation of benchmark/README.md, 4
    replicas of mixed traffic, 44.6 at an imbalance of 1.08, where bounds without a price had 45.8 at 1.06 and 44.4 at
    1.11.
    """
    mean = _mean(loads, alive)
    free, span = math.ceil(mean), mean * (bound - 1)
    return [max(load + 1 - free, 0) / span if span else 0.0 for load in loads]


def _mean(loads: Sequence[int], alive: Sequence[int]) -> float:
    """Of the replicas alive, one more request counted."""
    return (sum(loads[replica] for replica in alive) + 1) / len(alive)
