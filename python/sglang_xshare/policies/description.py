"""Descriptions of a schedule with all defaults resolved, for the log, /server_info, /metrics and the command line."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from .common import Override, spell_range
from .keys import spell_table
from .registry import get_policy
from .schedule import Schedule


def describe(schedule: Schedule, top_k: int | None = None) -> dict[str, Any]:
    """Return the policy, its keys, its phases and its limits as a JSON-able dict. All defaults are resolved.

    For `k0` and `kmax`, null means the model's top-k. If `top_k` is given, it replaces this null.

    The list `overrides` contains one entry for each range of layers or batch sizes in which keys change. An entry
    contains the changed keys. If another policy applies, the entry contains all keys of that policy. An entry without
    `layers` applies to all layers, and an entry without `by_rows` applies to all batch sizes. If two entries apply, the
    later entry wins.

    For `observe` the dict contains the description of each compared plan.
    """
    if schedule.observed:
        plans = {spelling: describe(part, top_k) for spelling, part in schedule.observed.items()}
        return {"policy": schedule.policy, "plans": plans}
    layers, sizes = _split(schedule.layer_overrides), _split(schedule.sizes)
    # No override applies to this layer and number of rows, so the keys there are the policy's own.
    plain = layers[-1][1] + 1 if layers else 0, sizes[-1][1] + 1 if sizes else 1
    base = _resolve(schedule, *plain, top_k)
    places = [(None, size) for size in sizes] + [(layer, size) for layer in layers for size in (None, *sizes)]
    overrides: list[dict[str, Any]] = []
    shown: dict[Any, dict[str, Any]] = {}
    for layer, size in places:
        keys = _resolve(schedule, layer[0] if layer else plain[0], size[0] if size else plain[1], top_k)
        if keys == shown.get((layer, None), shown.get((None, size), base)):
            continue
        shown[layer, size] = keys
        place = {name: spell_range(*span) for name, span in (("layers", layer), ("by_rows", size)) if span}
        same_policy = keys["policy"] == base["policy"]
        changed = {name: value for name, value in keys.items() if not same_policy or value != base[name]}
        overrides.append(place | changed)
    return {
        **base,
        "phases": list(schedule.phases),
        "min_rows": schedule.min_rows,
        "max_rows": schedule.max_rows,
        "rows": schedule.rows,
        "exact": schedule.given.get("exact"),
        "overrides": overrides,
    }


def describe_mass(schedule: Schedule) -> str | None:
    """Return a text with the share of utility that `mass` keeps.

    Return None if `mass` is not used, if `max_add` limits it, or if `layers` or `by_rows` may override it.
    """
    policy = get_policy(schedule.policy)
    keys = policy.complete(schedule.keys)
    mass = keys.get("mass")
    if not mass or schedule.keys.get("max_add") or schedule.layers or schedule.by_rows:
        return None
    table = policy.find_tables(keys).get("mass")
    return spell_table({rows: 100 * share for rows, share in table.items()}, " %") if table else f"{100 * mass:g} %"


def describe_keys(schedule: Schedule) -> dict[str, Any]:
    """Return the policy's own keys. If a value is a word that stands for numbers, the numbers follow the word."""
    policy = get_policy(schedule.policy)
    keys = dict(policy.complete(schedule.keys))
    tables = policy.find_tables(keys)
    return keys | {name: f"{keys[name]} ({spell_table(table)})" for name, table in tables.items()}


def _resolve(schedule: Schedule, layer: int, rows: int, top_k: int | None) -> dict[str, Any]:
    keys = schedule.keys_at(layer, rows)
    if keys["policy"] == "vanilla":
        return {"policy": "vanilla"}
    own = {name: value for name, value in keys.items() if name != "policy"}
    # A range of `by_rows` may begin below `min_rows` or end above `max_rows`, but the policy selects only between these
    # limits.
    rows = max(min(rows, schedule.max_rows or rows), schedule.min_rows)
    resolved = {"policy": keys["policy"], **get_policy(keys["policy"]).resolve(own, rows)}
    return resolved | {name: top_k for name in ("k0", "kmax") if resolved.get(name, 0) is None}


def _split(overrides: Sequence[Override]) -> list[tuple[int, int]]:
    """Return ranges (first, last) in ascending order. Within each range the same overrides apply."""
    starts = sorted({n for override in overrides for n in (override.first, override.last + 1)})
    spans = [(first, end - 1) for first, end in pairwise(starts)]
    return [span for span in spans if any(span[0] in override for override in overrides)]
