"""A budget that follows the traffic: what `governor` asks for, and the search that finds it. No device, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .registry import Policy

MOVABLE = ("k0", "add", "add_per_request", "target_per_rank", "budget", "retain")
"""Budgets of which a larger one keeps no less mass and no fewer experts."""
EVERY = 8
"""Steps a decision, where not given: the kept mass of a single step varies too much to decide on, the more the fewer
its rows; a mean of more steps would follow a change of traffic later.
"""
ALLOWED = 'an object such as {"kept_mass": 0.95, "add": [4, 40], "every": 8}'


@dataclass(frozen=True)
class Governor:
    """Hold the mean kept mass of a row at `kept_mass` with the smallest budget: key `key` of the policy, from `low` to
    `high`, decided on once in `every` steps.
    """

    kept_mass: float
    key: str
    low: int
    high: int
    every: int = EVERY

    @property
    def slack(self) -> float:
        """How far below the floor, or above what it was when the budget was found, the kept mass may go before another
        one is searched for: a quarter of what may be lost.
        """
        return (1 - self.kept_mass) / 4


@dataclass(frozen=True)
class Search:
    """Where a governor stands: at `budget`, between the largest one known to miss the floor (`below`, or one less than
    the lowest) and the smallest known to hold it (`above`, or the highest).

    Where these are neighbours, `above` is found, and stays until the traffic changes; `reference` is what it kept then.
    Until then the budget goes up or down by `stride`, twice as far each time, and once it has gone too far (0) by
    halves. So a search ends after at most `most_moves`, whatever is measured. While what is measured under one budget
    stays within half a `slack` of one mean, no other search follows.
    """

    budget: int
    below: int
    above: int
    stride: int = 0
    reference: float | None = None

    @property
    def settled(self) -> bool:
        """Whether the budget is found, and in force."""
        return self.above - self.below == 1 and self.budget == self.above


def begin(governor: Governor, budget: int) -> Search:
    """The search from a first budget within the bounds, of which nothing is known."""
    return Search(budget, governor.low - 1, governor.high)


def most_moves(governor: Governor) -> int:
    """No search moves the budget more often: twice the doublings that it takes to span the bounds, and the way back."""
    return 2 * (governor.high - governor.low + 1).bit_length() + 1


def decide(governor: Governor, search: Search, kept_mass: float) -> Search:
    """What to do after some steps under the search's budget that kept this mean mass."""
    now, below, above, stride = search.budget, search.below, search.above, search.stride
    if search.settled:
        if kept_mass < governor.kept_mass - governor.slack and now < governor.high:
            below, above, stride = now, governor.high, 1
        elif search.reference is None:
            return replace(search, reference=kept_mass)
        elif kept_mass > max(search.reference, governor.kept_mass) + governor.slack and now > governor.low:
            below, above, stride = governor.low - 1, now, -1
        else:
            return search
    else:
        holds = kept_mass >= governor.kept_mass
        below, above = (below, now) if holds else (min(now, governor.high - 1), above)
        stride = 0 if holds == (stride > 0) else 2 * stride
    if above - below == 1:
        return Search(above, below, above, reference=kept_mass if above == now else None)
    if stride > 0:
        budget = min(below + stride, above)
    elif stride < 0:
        budget = max(above + stride, below + 1)
    else:
        budget = (below + above) // 2
    return Search(budget, below, above, stride)


def read_governor(value: Any, policy: Policy) -> Governor | None:
    """The governor that key `governor` of a policy asks for; None for no value. Raises ValueError in one line."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"governor = {value!r}: allowed is {ALLOWED}")
    movable = [key for key in MOVABLE if key in policy.keys]
    if not movable:
        raise ValueError(f"governor = {value!r}: {policy.name} has no budget to move; allowed with another policy")
    keys = [key for key in value if key not in ("kept_mass", "every")]
    if len(keys) != 1 or keys[0] not in movable:
        found = ", ".join(map(repr, sorted(keys))) or "no budget"
        raise ValueError(f"governor: {found}: allowed of {policy.name} is one of {', '.join(movable)}")
    kept_mass, every, bounds = value.get("kept_mass"), value.get("every", EVERY), value[keys[0]]
    if type(kept_mass) is not float or not 0 < kept_mass < 1:
        raise ValueError(f"governor: kept_mass = {kept_mass!r}: allowed is a number in (0, 1)")
    if type(every) is not int or every < 1:
        raise ValueError(f"governor: every = {every!r}: allowed is an integer of at least 1")
    # A captured graph has no step for a budget that was 0 then.
    is_pair = isinstance(bounds, list | tuple) and len(bounds) == 2 and all(type(bound) is int for bound in bounds)
    if not is_pair or not 1 <= bounds[0] < bounds[1]:
        raise ValueError(f"governor: {keys[0]} = {bounds!r}: allowed are two integers from 1 up, the smaller one first")
    return Governor(kept_mass, keys[0], bounds[0], bounds[1], every)


def read_start(governor: Governor, keys: Mapping[str, Any]) -> int:
    """The budget to start from: the policy's own key, which is within the bounds, or else the highest."""
    start = keys.get(governor.key, governor.high)
    if type(start) is not int or not governor.low <= start <= governor.high:
        allowed = f"an integer from {governor.low} to {governor.high}"
        raise ValueError(f"{governor.key} = {start!r}: its governor allows {allowed}")
    return start
