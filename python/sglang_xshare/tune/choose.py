"""The choice of a setting for each group of layers, from what each costs alone: losses are taken to add up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """A setting of one group of layers: what it loses alone, in nats a token, and how many experts of a step it wakes,
    above or below vanilla.
    """

    name: str
    loss: float
    experts: float


def smooth(options: Sequence[Option]) -> list[Option]:
    """The options by falling experts, with losses that never fall and are never below 0: those that stand the wrong way
    round, by their errors, share their mean (pool adjacent violators).
    """
    pools: list[list[Option]] = []
    for option in sorted(options, key=lambda one: -one.experts):
        pools.append([option])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [Option(one.name, max(_mean(pool), 0.0), one.experts) for pool in pools for one in pool]


def choose(groups: Mapping[str, Sequence[Option]], tolerance: float) -> dict[str, Option]:
    """The option of each group with which all together wake the fewest experts while their losses add up to at most
    `tolerance`. Every group has an option without loss.

    Exact on a grid of a thousandth of the tolerance, to which losses are rounded up (knapsack with one item a class).
    """
    grid = 1000
    best: dict[int, tuple[float, dict[str, Option]]] = {0: (0.0, {})}
    for group, options in groups.items():
        after: dict[int, tuple[float, dict[str, Option]]] = {}
        for option in options:
            share = 0 if option.loss <= 0 else (grid + 1 if tolerance <= 0 else -int(-option.loss * grid // tolerance))
            for spent, (experts, chosen) in best.items():
                total = spent + share
                if total <= grid and (total not in after or experts + option.experts < after[total][0]):
                    after[total] = experts + option.experts, {**chosen, group: option}
        best = _keep_front(after)
    return min(best.values(), key=lambda one: one[0])[1]


def _keep_front(states: dict[int, tuple[float, dict[str, Option]]]) -> dict[int, tuple[float, dict[str, Option]]]:
    """Those states that wake fewer experts than every one that spends less."""
    front: dict[int, tuple[float, dict[str, Option]]] = {}
    fewest = float("inf")
    for spent in sorted(states):
        if states[spent][0] < fewest:
            fewest = states[spent][0]
            front[spent] = states[spent]
    return front


def _mean(pool: Sequence[Option]) -> float:
    return sum(one.loss for one in pool) / len(pool)
