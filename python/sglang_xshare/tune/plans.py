"""Policies as GET and POST /expert_policy spell them: a setting for each group of layers and each batch size."""

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

from ..policies.common import spell_range
from ..policies.registry import get_policy
from ..policies.spelling import parse_policy

VANILLA_SETTING = "vanilla"
Layers = tuple[int, ...]
FIRST_SIZE = 2
"""A batch of one row is vanilla by default."""


def group_layers(layers: Sequence[int], groups: int) -> list[Layers]:
    """At most `groups` runs of consecutive layers, as equal as can be."""
    groups = min(groups, len(layers))
    ends = [len(layers) * number // groups for number in range(groups + 1)]
    return [tuple(layers[first:last]) for first, last in pairwise(ends)]


def name_layers(layers: Layers) -> str:
    """As a key of `layers`: the range from the first to the last."""
    return spell_range(layers[0], layers[-1])


def build_policy(settings: Mapping[Layers, str]) -> dict[str, Any]:
    """A policy with each setting, spelt as on a command line, in its layers. All vanilla is vanilla."""
    return join_batches({FIRST_SIZE: settings})


def join_batches(plans: Mapping[int, Mapping[Layers, str]]) -> dict[str, Any]:
    """One policy of settings for several batch sizes. Each size's hold from the size below it on, those of the largest
    for all beyond; where they are vanilla in every layer, so is everything beyond the size below.
    """
    sizes = sorted(plans)
    while sizes and set(plans[sizes[-1]].values()) == {VANILLA_SETTING}:
        sizes.pop()
    if not sizes:
        return {"policy": VANILLA_SETTING}
    settings = [setting for size in sizes for setting in plans[size].values() if setting != VANILLA_SETTING]
    last = [setting for setting in plans[sizes[-1]].values() if setting != VANILLA_SETTING]
    base = max(last, key=last.count)
    overrides = _Overrides(base, settings)
    policy = overrides.base
    if len(sizes) < len(plans):
        policy["max_rows"] = sizes[-1]
    layers = {name_layers(group): overrides.of(one) for group, one in plans[sizes[-1]].items() if one != base}
    if layers:
        policy["layers"] = layers
    by_rows = {}
    for below, size in pairwise([FIRST_SIZE - 1, *sizes[:-1]]):
        inner = {name_layers(group): overrides.of(one) for group, one in plans[size].items()}
        by_rows[spell_range(below + 1, size)] = {"layers": inner}
    if by_rows:
        policy["by_rows"] = by_rows
    return policy


class _Overrides:
    """Settings as overrides of a base one. Those of one policy say every key that one of them gives, or in which two of
    them differ: an override starts from what it overrides, and the default of one key may depend on another.
    """

    def __init__(self, base: str, settings: Sequence[str]) -> None:
        name, keys = parse_policy(base)
        self.base: dict[str, Any] = {"policy": name, **keys}
        self._told: dict[str, set[str]] = {}
        for setting in settings:
            name, keys = parse_policy(setting)
            self._told.setdefault(name, set()).update(keys)
        for one, other in combinations(settings, 2):
            name = parse_policy(one)[0]
            if name == parse_policy(other)[0]:
                pairs = zip(_resolve(one).items(), _resolve(other).values(), strict=True)
                self._told[name].update(key for (key, value), others in pairs if value != others)

    def of(self, setting: str) -> dict[str, Any]:
        """One of them."""
        name = parse_policy(setting)[0]
        if name == VANILLA_SETTING:
            return {"policy": name}
        told = self._told[name]
        return {"policy": name, **{key: value for key, value in _resolve(setting).items() if key in told}}


def _resolve(setting: str) -> dict[str, Any]:
    name, keys = parse_policy(setting)
    return get_policy(name).resolve(keys)
