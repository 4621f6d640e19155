"""The order in which groups of layers give up experts, by what each setting costs alone: losses are taken to add up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Option:
    """A setting of one group of layers: what it loses alone, in nats a token, of which divergence is the estimate, and
    how many experts of a step are active, above or below vanilla.
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


def trim(options: Sequence[Option]) -> list[Option]:
    """Those of smoothed options between which every expert costs more than the one before: the lower convex hull. What
    lies above the line between two others is never worth its loss.
    """
    hull: list[Option] = []
    for option in options:
        if hull and option.experts == hull[-1].experts:
            continue
        while len(hull) > 1 and _price(hull[-1], option) < _price(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def rank_choices(groups: Mapping[str, Sequence[Option]]) -> list[dict[str, Option]]:
    """Choices of an option for each group, from all first to all last: each moves one group on to its next option, that
    whose experts cost least. None with as few experts has a smaller sum of losses, and losses rise along them.

    The options of a group are trimmed: experts fall, and their price rises.
    """
    moves = [(_price(*pair), group, pair[1]) for group, options in groups.items() for pair in pairwise(options)]
    choice = {group: options[0] for group, options in groups.items()}
    choices = [choice]
    for _, group, option in sorted(moves, key=lambda move: move[0]):
        choices.append({**choices[-1], group: option})
    return choices


def _price(one: Option, next: Option) -> float:
    """Nats an expert, from an option to one with fewer experts."""
    return (next.loss - one.loss) / (one.experts - next.experts)


def _mean(pool: Sequence[Option]) -> float:
    return sum(one.loss for one in pool) / len(pool)
