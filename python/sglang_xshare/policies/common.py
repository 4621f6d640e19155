"""The keys that all policies share except `vanilla` and `observe`.

They define in which forwards, layers and batch sizes a policy selects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .exact import ALLOWED
from .keys import Key, as_json
from .registry import Policy

PHASES = ("decode", "verify")
SPECULATES = "--speculative-algorithm"
"""The server's flag for speculative decoding. Other commands have another flag for it."""


COMMON_KEYS = {
    "phases": Key(
        list, "the forwards in which the policy selects", words=f"a list of {' and '.join(map(repr, PHASES))}"
    ),
    "min_rows": Key(int, "a step of fewer router rows is vanilla", low=1, default=2),
    "max_rows": Key(int, "a step of more router rows is vanilla; null: no limit", low=1),
    "rows": Key(
        str,
        "if each rank routes its own rows (--moe-a2a-backend): select among the rows of all ranks, or its own rows",
        choices=("batch", "rank"),
        default="batch",
    ),
    "exact": Key(
        dict,
        "default for requests that do not set expert_policy: exact from a priority on (--enable-priority-scheduling), "
        "or always",
        words=ALLOWED,
    ),
    "layers": Key(
        dict,
        "other keys, or another policy, by layer id; later ranges win",
        words='an object such as {"0-3": {"k0": 2}}',
        default={},
    ),
    "by_rows": Key(
        dict,
        "like layers, by router rows, padding included; layers override by_rows, and layers in a range override both",
        words='an object such as {"2-4": {"k0": 2}}',
        default={},
    ),
}


@dataclass(frozen=True)
class Override:
    """Keys that replace a policy's keys in a range of layers or of row counts. The range includes `first` and `last`.

    An override for row counts can contain further overrides for `layers`.
    """

    first: int
    last: int
    keys: dict[str, Any]
    layers: tuple[Override, ...] = ()

    def __contains__(self, number: int) -> bool:
        return self.first <= number <= self.last


def spell_range(first: int, last: int) -> str:
    """Return a range in the form of a key of `layers` or `by_rows`, such as "3" or "0-3"."""
    return str(first) if first == last else f"{first}-{last}"


def read_phases(
    value: Any, policy: Policy, keys: dict[str, Any], speculative: bool, speculates: str
) -> tuple[str, ...]:
    """Return the phases in which the policy selects. Raises ValueError naming the key.

    An error may name `speculates`, the flag for speculative decoding.
    """
    if value is None:
        if not speculative and policy.phases == ("verify",):
            never = f"{policy.name} selects in verify steps only"
            missing = [*policy.list_missing(keys), never]
            raise ValueError(f'{"; ".join(missing)}: must be used with {speculates}, or phases = ["decode"]')
        return policy.phases
    if not isinstance(value, list) or not value or any(phase not in PHASES for phase in value):
        raise ValueError(f"phases = {as_json(value)}: must be {COMMON_KEYS['phases'].allowed}")
    occurs = "verify" if speculative else "decode"
    if occurs not in value:
        reason = "speculative decoding verifies at every step" if speculative else "only speculative decoding verifies"
        raise ValueError(f'phases = {as_json(value)}: must contain "{occurs}", because {reason}')
    return tuple(phase for phase in PHASES if phase in value)


def read_overrides(key: str, value: Any, lowest: int) -> tuple[Override, ...]:
    """Return the overrides that `layers` or `by_rows` contains.

    `lowest` is the smallest layer id or row count that is allowed.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{key} = {as_json(value)}: must be {COMMON_KEYS[key].allowed}")
    overrides = []
    for place, keys in value.items():
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", place)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (-1, -1)
        if not lowest <= first <= last:
            raise ValueError(
                f'{key} {as_json(place)}: must be a number of at least {lowest} or a range such as "{lowest}-3"'
            )
        inner: tuple[Override, ...] = ()
        if key == "by_rows" and isinstance(keys, dict) and "layers" in keys:
            inner = read_overrides("layers", keys["layers"], lowest=0)
            keys = {name: value for name, value in keys.items() if name != "layers"}
        if not isinstance(keys, dict) or any(name in COMMON_KEYS for name in keys):
            raise ValueError(f"{key} {as_json(place)} = {as_json(keys)}: must be an object of the policy's own keys")
        if keys.get("policy") == "observe":
            raise ValueError(f"{key} {place!r}: observe: must be a policy that selects, or vanilla")
        overrides.append(Override(first, last, keys, inner))
    return tuple(overrides)
