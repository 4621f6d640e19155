"""The text form of a policy with its keys, such as `xshare:k0=1,add=24`, for all commands that take policies."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .keys import as_json, check_depth, collect, override_keys, suggest
from .registry import list_policies

SPELLING = (
    "NAME, NAME:key=value,key=value or NAME:{JSON object}, such as xshare:k0=1,add=24, or a preset, xshare:careful"
)


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Read a policy from a text in the form of `SPELLING`, and return its name and keys.

    A value that is not valid JSON is a string. Keys after a preset replace the preset's keys. Raises ValueError if the
    text has another form or a key is given twice.
    """
    name, colon, keys = text.partition(":")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name) or (colon and not keys):
        near = suggest(name, [policy.name for policy in list_policies()])
        raise ValueError(f"policy {as_json(text)}: must be {SPELLING}{near}")
    try:
        presets = next((policy.presets for policy in list_policies() if policy.name == name), {})
        first, _, rest = keys.partition(",")
        if keys.startswith("{"):
            found = json.loads(keys, object_pairs_hook=collect)
        else:
            pairs = (rest if first in presets else keys).split(",")
            found = collect(_parse_pair(pair, presets) for pair in pairs if pair)
        check_depth(found)
        return name, override_keys(presets.get(first, {}), found)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"policy {as_json(text)}: {error}; a policy must be {SPELLING}") from None


def spell_policy(name: str, keys: Mapping[str, Any]) -> str:
    """Return the text of a policy with JSON-able keys. `parse_policy` reads this text."""
    plain = {key: value if isinstance(value, str) else json.dumps(value) for key, value in keys.items()}
    text = ",".join(f"{key}={value}" for key, value in plain.items())
    if not text:
        return name
    spelt = f"{name}:{text}"
    try:
        if parse_policy(spelt) == (name, dict(keys)):
            return spelt
    except ValueError:
        pass  # a value with commas needs the JSON form
    return f"{name}:{json.dumps(keys)}"


def _parse_pair(pair: str, presets: Iterable[str]) -> tuple[str, Any]:
    key, equals, value = pair.partition("=")
    if not key or not equals or not value:
        if pair in presets:
            raise ValueError(f"{as_json(pair)} is a preset, which must stand first and alone")
        raise ValueError(f"{as_json(pair)} must be key=value" + "".join(f", or {preset}" for preset in presets))
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
