"""Where and when a policy applies: the keys all policies share, and the plan they give for a layer and a batch size.

The stage asks it before every step; `select()` knows nothing of phases, layers or batch sizes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plan import SelectionPlan
from .baselines import VANILLA
from .registry import Policy, build_plan, get_policy
from .spelling import parse_policy

PHASES = ("decode", "verify")


@dataclass(frozen=True)
class CommonKey:
    """A key of every policy that selects, in words. `default` is what an absent key stands for."""

    allowed: str
    help: str
    default: Any = None


_COUNT = "an integer of at least 1"
COMMON_KEYS = {
    "phases": CommonKey(f"a list of {' and '.join(map(repr, PHASES))}", "the forwards it selects in"),
    "min_tokens": CommonKey(_COUNT, "a step of fewer router rows is vanilla", 2),
    "max_tokens": CommonKey(_COUNT, "a step of more router rows is vanilla; off: no limit"),
    "layers": CommonKey(
        'an object such as {"0-3": {"k0": 2}}', "other keys, or another policy, by layer id; later ranges win", {}
    ),
    "by_batch": CommonKey(
        'an object such as {"2-4": {"k0": 2}}', "the same by router rows, a graph's captured size; layers win", {}
    ),
}


@dataclass(frozen=True)
class Override:
    """Keys that replace a policy's own for a closed range of layers or batch sizes."""

    first: int
    last: int
    keys: dict[str, Any]

    def __contains__(self, number: int) -> bool:
        return self.first <= number <= self.last


@dataclass(frozen=True, eq=False)
class Schedule:
    """A validated policy with its common keys. `by_batch` overrides the base keys, `layers` overrides both.

    `observed` are the schedules that `observe` compares, by their spelling; empty for every other policy. `given` are
    the policy and the keys it was built from.
    """

    policy: str
    keys: dict[str, Any]
    phases: tuple[str, ...]
    min_tokens: int
    max_tokens: int | None
    layers: tuple[Override, ...]
    by_batch: tuple[Override, ...]
    observed: Mapping[str, Schedule] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    _plans: dict[tuple[int, int], SelectionPlan | None] = field(default_factory=dict, repr=False)
    """Those of layers and batch sizes met so far: they go with the schedule, which a running server may change."""

    @property
    def parts(self) -> list[Schedule]:
        """The schedules that plan for it: those it observes, or itself."""
        return list(self.observed.values()) or [self]

    def reason_to_skip(self, phase: str, rows: int) -> str | None:
        """Why a step of `rows` router rows stays vanilla, or None where the policy applies."""
        if phase not in self.phases:
            return "phase"
        return self._reason_to_skip_size(rows)

    def _reason_to_skip_size(self, rows: int) -> str | None:
        if rows < self.min_tokens:
            return "min_tokens"
        if self.max_tokens is not None and rows > self.max_tokens:
            return "max_tokens"
        return None

    def plans_for(self, layer: int, phase: str, rows: int) -> list[SelectionPlan]:
        """What each of `parts` selects by in such a step; the vanilla plan where it does not."""
        skips = [part.reason_to_skip(phase, rows) is not None for part in self.parts]
        plans = [part.plan(layer, rows) for part in self.parts]
        return [VANILLA if skip or plan is None else plan for skip, plan in zip(skips, plans, strict=True)]

    def plan(self, layer: int, rows: int) -> SelectionPlan | None:
        """The plan for a layer id and a number of router rows; None where an override makes it vanilla."""
        place = layer, rows
        if place not in self._plans:
            keys = self.keys_at(layer, rows)
            self._plans[place] = None if keys["policy"] == "vanilla" else build_plan(keys)
        return self._plans[place]

    def keys_at(self, layer: int, rows: int) -> dict[str, Any]:
        """The policy and its keys for a layer id and a number of router rows, with the overrides that apply."""
        keys = {"policy": self.policy, **self.keys}
        for overrides, number in ((self.by_batch, rows), (self.layers, layer)):
            for override in overrides:
                if number in override:
                    keys = _merge(keys, override.keys)
        return keys

    def plans(self, model_layers: Sequence[int] | None = None) -> list[SelectionPlan]:
        """Every plan that some layer and batch size can get: building all finds a wrong override at start-up.

        `model_layers` are the ids of the model's layers, None where they are not known yet. Raises ValueError where an
        override names a layer beyond them, none of them or no batch size the policy applies to, or where no plan is
        left.
        """
        if self.observed:
            return list(dict.fromkeys(plan for part in self.parts for plan in part.plans(model_layers)))
        for override in self.layers:
            if model_layers is not None and override.last > max(model_layers):
                raise ValueError(f"layers {override.last}: the model's layers are 0 to {max(model_layers)}")
            if model_layers is not None and not any(layer in override for layer in model_layers):
                place = f"layers {override.first} to {override.last}"
                raise ValueError(
                    f"{place}: none is an MoE layer; the model's are {min(model_layers)} to {max(model_layers)}"
                )
        for override in self.by_batch:
            if override.last < self.min_tokens or override.first > (self.max_tokens or override.first):
                limits = f"from min_tokens = {self.min_tokens}"
                limits += "" if self.max_tokens is None else f" to max_tokens = {self.max_tokens}"
                raise ValueError(f"by_batch {override.first}: allowed is {limits}")
        layers = {0, *_boundaries(self.layers)} if model_layers is None else model_layers
        sizes = [n for n in {self.min_tokens, *_boundaries(self.by_batch)} if self._reason_to_skip_size(n) is None]
        found = [self.plan(layer, rows) for layer in layers for rows in sizes]
        plans = list({plan: None for plan in found if plan is not None})
        if not plans:
            raise ValueError("every layer and batch size is overridden to vanilla: the policy would never run")
        return plans


def build_schedule(name: str, config: dict[str, Any], speculative: bool) -> Schedule | None:
    """Validate a policy's name, its keys and the common keys. Returns None for `vanilla`.

    `speculative` tells whether the server speculates: it decides the published defaults of a policy given without keys,
    and whether phase `verify` can occur. Raises ValueError naming the key, the value and what is allowed.
    """
    policy = get_policy(name)
    common = {key: config[key] for key in COMMON_KEYS if key in config}
    keys = {key: value for key, value in config.items() if key not in COMMON_KEYS}
    if "policy" in keys:
        raise ValueError(f"policy = {keys['policy']!r}: allowed only in an override; --expert-policy names the policy")
    if name == "vanilla":
        if config:
            raise ValueError(f"{next(iter(config))}: vanilla has no keys")
        return None
    if name == "observe":
        return _build_observing(config, speculative)
    policy.check_names(keys, others=COMMON_KEYS)
    schedule = Schedule(
        policy=name,
        keys=keys or policy.default_keys(speculative),
        phases=_read_phases(common.get("phases"), policy, keys, speculative),
        min_tokens=_read_count("min_tokens", common.get("min_tokens", COMMON_KEYS["min_tokens"].default)),
        max_tokens=None if "max_tokens" not in common else _read_count("max_tokens", common["max_tokens"]),
        layers=_read_overrides("layers", common.get("layers", {}), lowest=0),
        by_batch=_read_overrides("by_batch", common.get("by_batch", {}), lowest=1),
        given={"policy": name, **config},
    )
    if schedule.max_tokens is not None and schedule.max_tokens < schedule.min_tokens:
        raise ValueError(f"max_tokens = {schedule.max_tokens}: allowed is at least min_tokens = {schedule.min_tokens}")
    for plan in schedule.plans():
        if plan.selects_nothing:
            raise ValueError("k0 = 0 without a budget selects no expert: allowed is k0 from 1 up, or a budget")
        _check_requests(plan, speculative)
    return schedule


def _build_observing(config: dict[str, Any], speculative: bool) -> Schedule:
    """The schedule of `observe`: vanilla in every step, with a schedule of its own for each policy it compares."""
    policy = get_policy("observe")
    policy.check_names(config)
    observed: dict[str, Schedule] = {}
    for plan in policy.resolve(config)["plans"]:
        spelling = plan if isinstance(plan, str) else json.dumps(plan)
        try:
            name, keys = _read_observed(plan)
            schedule = build_schedule(name, keys, speculative)
        except ValueError as error:
            raise ValueError(f"plans: {spelling}: {error}") from None
        if schedule is None or schedule.observed or spelling in observed:
            raise ValueError(f"plans: {spelling}: allowed is every policy that selects, each spelling once")
        observed[spelling] = schedule
    return Schedule("observe", dict(config), PHASES, 1, None, (), (), observed, {"policy": "observe", **config})


def _read_observed(plan: Any) -> tuple[str, dict[str, Any]]:
    """(policy, keys) of one entry of `plans`: a spelling, or an object with a key "policy"."""
    if isinstance(plan, str):
        return parse_policy(plan)
    if not isinstance(plan, dict) or "policy" not in plan:
        raise ValueError('allowed is a spelling such as "oea:k0=3", or an object such as {"policy": "oea", "k0": 3}')
    return plan["policy"], {key: value for key, value in plan.items() if key != "policy"}


def _check_requests(plan: SelectionPlan, speculative: bool) -> None:
    """Refuse a plan by request where none are known: in plain decode each row would be a request of its own."""
    if speculative:
        return
    reason = "without speculative decoding every row would be a request of its own"
    if plan.add_per_request:
        raise ValueError(f"add_per_request = {plan.add_per_request}: {reason}; allowed is a budget of the batch, add")
    if plan.scope == "request":
        raise ValueError(f"scope = 'request': {reason}; allowed is \"batch\"")


def _boundaries(overrides: tuple[Override, ...]) -> set[int]:
    """At least one number of every stretch in which the same overrides apply."""
    return {n for override in overrides for n in (override.first, override.last, override.last + 1)}


def _merge(keys: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """An override of another policy starts from that policy's defaults, one without `policy` from the keys so far."""
    changed = override.get("policy", keys["policy"]) != keys["policy"]
    return dict(override) if changed else {**keys, **override}


def _read_phases(value: Any, policy: Policy, keys: dict[str, Any], speculative: bool) -> tuple[str, ...]:
    if value is None:
        if not speculative and policy.phases == ("verify",):
            never = f"{policy.name} without speculative decoding: it selects in target-verify"
            missing = [*policy.list_missing(keys), never]
            raise ValueError(f'{"; ".join(missing)}; allowed is --speculative-algorithm, or phases = ["decode"]')
        return policy.phases
    if not isinstance(value, list) or not value or any(phase not in PHASES for phase in value):
        raise ValueError(f"phases = {value!r}: allowed is {COMMON_KEYS['phases'].allowed}")
    occurs = "verify" if speculative else "decode"
    if occurs not in value:
        reason = "speculative decoding verifies at every step" if speculative else "only speculative decoding verifies"
        raise ValueError(f'phases = {value!r}: {reason}; allowed here is ["{occurs}"]')
    return tuple(phase for phase in PHASES if phase in value)


def _read_count(key: str, value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} = {value!r}: allowed is {COMMON_KEYS[key].allowed}")
    return value


def _read_overrides(key: str, value: Any, lowest: int) -> tuple[Override, ...]:
    if not isinstance(value, dict):
        raise ValueError(f"{key} = {value!r}: allowed is {COMMON_KEYS[key].allowed}")
    overrides = []
    for place, keys in value.items():
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", place)
        first = int(match[1]) if match else -1
        last = int(match[2] or match[1]) if match else -1
        if not lowest <= first <= last:
            raise ValueError(f'{key} {place!r}: allowed is a number from {lowest} or a range such as "{lowest}-3"')
        if not isinstance(keys, dict) or any(name in COMMON_KEYS for name in keys):
            raise ValueError(f"{key} {place!r} = {keys!r}: allowed is an object of the policy's own keys")
        if keys.get("policy") == "observe":
            raise ValueError(f"{key} {place!r}: observe: allowed is a policy that selects, or vanilla")
        overrides.append(Override(first, last, keys))
    return tuple(overrides)
