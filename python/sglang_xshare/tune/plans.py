"""Policies with a setting for each group of layers and each batch size.

They have the form that GET and POST /expert_policy use.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..policies.common import spell_range
from ..policies.registry import get_policy
from ..policies.spelling import parse_policy

VANILLA_SETTING = "vanilla"
Layers = tuple[int, ...]
FIRST_SIZE = 2
"""The smallest batch size that a policy changes. A batch of one row is vanilla by default."""


def group_layers(layers: Sequence[int], groups: int) -> list[Layers]:
    """Divide the layers into groups of consecutive layers, at most `groups`. The groups are as equal as possible."""
    groups = min(groups, len(layers))
    ends = [len(layers) * number // groups for number in range(groups + 1)]
    return [tuple(layers[first:last]) for first, last in pairwise(ends)]


def name_layers(layers: Layers) -> str:
    """Return the key for a group of layers, which is the range from the first to the last layer."""
    return spell_range(layers[0], layers[-1])


def build_policy(settings: Mapping[Layers, str]) -> dict[str, Any]:
    """Return a policy that uses each setting in its layers. The policy is vanilla if all settings are vanilla.

    A setting is written as on a command line.
    """
    return join_batches({FIRST_SIZE: settings})


def join_batches(plans: Mapping[int, Mapping[Layers, str]]) -> dict[str, Any]:
    """Return one policy from the settings of several batch sizes.

    The settings of a batch size also apply to smaller batches, down to the next smaller size in `plans`. The settings
    of the largest size also apply to all larger batches. If the largest size is vanilla in every layer, all batches
    above the next smaller size are vanilla.
    """
    sizes = sorted(plans)
    while sizes and set(plans[sizes[-1]].values()) == {VANILLA_SETTING}:
        sizes.pop()
    if not sizes:
        return {"policy": VANILLA_SETTING}
    settings = [setting for size in sizes for setting in plans[size].values() if setting != VANILLA_SETTING]
    last = [setting for setting in plans[sizes[-1]].values() if setting != VANILLA_SETTING]
    base = max(last, key=last.count)
    overrides = _list_overrides(settings)
    name, keys = parse_policy(base)
    policy: dict[str, Any] = {"policy": name, **keys}
    if len(sizes) < len(plans):
        policy["max_rows"] = sizes[-1]
    layers = {name_layers(group): overrides[one] for group, one in plans[sizes[-1]].items() if one != base}
    if layers:
        policy["layers"] = layers
    by_rows = {}
    for below, size in pairwise([FIRST_SIZE - 1, *sizes[:-1]]):
        inner = {name_layers(group): overrides[one] for group, one in plans[size].items()}
        by_rows[spell_range(below + 1, size)] = {"layers": inner}
    if by_rows:
        policy["by_rows"] = by_rows
    return policy


def _list_overrides(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return each setting as an override.

    If an override does not set a key, the key keeps the policy's value. The default of a key may depend on another key.
    So all overrides of a policy set the same keys: all keys that any of the settings sets, and all keys whose values
    differ between the settings.
    """
    given = {setting: parse_policy(setting) for setting in settings}
    found = {VANILLA_SETTING: {"policy": VANILLA_SETTING}}
    for policy in {name for name, _ in given.values()}:
        keys = {one: get_policy(policy).resolve(own) for one, (name, own) in given.items() if name == policy}
        first, *others = keys.values()
        told = {key for one in keys for key in given[one][1]}
        told |= {key for key in first for other in others if other[key] != first[key]}
        for one, resolved in keys.items():
            found[one] = {"policy": policy, **{key: value for key, value in resolved.items() if key in told}}
    return found
