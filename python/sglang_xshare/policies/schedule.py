"""The schedule of a policy: the plan for each layer and batch size. The stage reads the schedule before every step."""

from __future__ import annotations

import json
import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from .baselines import VANILLA
from .common import COMMON_KEYS, PHASES, SPECULATES, Override, read_overrides, read_phases
from .exact import Rule, read_rule
from .keys import as_json, override_keys, shorten
from .plan import AUTO, MOST_LIKELY, SelectionPlan
from .registry import get_policy
from .spelling import parse_policy, spell_policy

MOST_RANGES, MOST_PARTS = 1024, 4096
"""The largest number of overrides in a schedule, and the largest number of parts. Overrides divide layers and rows into
parts. At both limits, a switch needs 2.6 s to build, describe and check the plans. The server answers no request during
this time.
"""
MOST_PLANS = 64
"""The largest number of plans in `observe`. The ring buffer of a trace takes 98 kB of device memory for each layer and
plan.
"""


@dataclass(eq=False)
class Schedule:
    """A validated policy with its common keys.

    `by_rows` overrides the policy's own keys, and `layers` overrides `by_rows`. Layers inside a range of `by_rows`
    override everything else. `observed` contains the schedules that `observe` compares. Its keys are these policies as
    text. It is empty for every other policy. `given` contains the policy and the keys that a user has set. `rows` is
    "rank" if each rank selects only among its own rows. `exact` is the rule for requests that do not set
    `expert_policy`. `acceptance` is the number that a plan uses instead of "auto".
    """

    policy: str
    keys: dict[str, Any]
    phases: tuple[str, ...]
    min_rows: int
    max_rows: int | None = None
    layers: tuple[Override, ...] = ()
    by_rows: tuple[Override, ...] = ()
    observed: Mapping[str, Schedule] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    rows: str = "batch"
    exact: Rule = field(default_factory=Rule)
    acceptance: float = MOST_LIKELY
    _plans: dict[tuple[int, ...], SelectionPlan | None] = field(default_factory=dict, init=False, repr=False)
    """The plans built so far. A key contains the range of rows and the overrides. Most layers share a plan."""

    @property
    def parts(self) -> list[Schedule]:
        """Return the schedules that `observe` compares. For all other policies the list contains only `self`."""
        return list(self.observed.values()) or [self]

    def reason_to_skip(self, phase: str, rows: int) -> str | None:
        """Return the reason why a step of `rows` router rows is vanilla, or None if the policy applies."""
        if phase not in self.phases:
            return "phase"
        if rows < self.min_rows:
            return "min_rows"
        if self.max_rows is not None and rows > self.max_rows:
            return "max_rows"
        return None

    def plans_for(self, layer: int, phase: str, rows: int) -> list[SelectionPlan]:
        """Return one plan for each schedule in `parts`. A schedule that skips the step has the vanilla plan."""
        plans = [None if part.reason_to_skip(phase, rows) else part.plan(layer, rows) for part in self.parts]
        return [plan or VANILLA for plan in plans]

    def plan(self, layer: int, rows: int) -> SelectionPlan | None:
        """Return the plan for a layer id and a number of router rows, or None if an override selects vanilla."""
        which = bisect(self.changes, rows), *map(id, self._overrides_at(layer, rows))
        if which not in self._plans:
            keys = self.keys_at(layer, rows)
            name = keys.pop("policy")
            plan = None if name == "vanilla" else get_policy(name).build(keys, rows)
            self._plans[which] = replace(plan, acceptance=self.acceptance) if plan and plan.estimates else plan
        return self._plans[which]

    @cached_property
    def estimates(self) -> bool:
        """Return whether a plan uses the server's estimate of `acceptance`."""
        return any(plan.estimates for plan in self.plans())

    def weigh(self, acceptance: float) -> Schedule:
        """Return the schedule with a new estimate of `acceptance`."""
        return replace(self, acceptance=acceptance) if self.estimates else self

    def plans_at(self, rows: int) -> list[SelectionPlan | None]:
        """Return the plans that layers can have in a step of `rows` router rows. None stands for vanilla."""
        return [self.plan(layer, rows) for layer in {0, *_boundaries(self.layer_overrides)}]

    def keys_at(self, layer: int, rows: int) -> dict[str, Any]:
        """Return the policy and its keys for a layer id and a number of router rows. All overrides are applied."""
        keys = {"policy": self.policy, **self.keys}
        for override in self._overrides_at(layer, rows):
            # Another policy starts from its own defaults, not from the keys of the previous policy.
            is_another = override.keys.get("policy", keys["policy"]) != keys["policy"]
            keys = dict(override.keys) if is_another else override_keys(keys, override.keys)
        return keys

    @cached_property
    def changes(self) -> list[int]:
        """Return the row counts from which a word stands for another number. For `mass` these are 8 and 16."""
        named = [part.keys["policy"] for part in (*self.by_rows, *self.layer_overrides) if "policy" in part.keys]
        return sorted({rows for name in (self.policy, *named) for rows in get_policy(name).changes})

    @property
    def sizes(self) -> tuple[Override, ...]:
        """Return the overrides of `by_rows`, followed by overrides without keys.

        The overrides without keys divide the rows from `min_rows` to `max_rows`. Each ends before a row count in
        `changes`, because the plan can change there. The last one is omitted, because callers also read the row after
        each range.
        """
        most = self.max_rows or math.inf
        starts = [self.min_rows, *(rows for rows in self.changes if self.min_rows < rows <= most)]
        return (*self.by_rows, *(Override(first, end - 1, {}) for first, end in pairwise(starts)))

    def _overrides_at(self, layer: int, rows: int) -> list[Override]:
        """Return the overrides that apply to a layer id and a number of rows. A later override wins."""
        sizes = [override for override in self.by_rows if rows in override]
        by_layer = [*self.layers, *(inner for override in sizes for inner in override.layers)]
        return [*sizes, *(override for override in by_layer if layer in override)]

    @property
    def layer_overrides(self) -> tuple[Override, ...]:
        """Return all overrides for layers: first the ones for all batch sizes, then the ones for some batch sizes."""
        return (*self.layers, *(inner for override in self.by_rows for inner in override.layers))

    def plans(self, model_layers: Sequence[int] | None = None) -> list[SelectionPlan]:
        """Return every plan that some layer and batch size can have.

        `model_layers` contains the ids of the model's MoE layers, or is None while the ids are unknown. Raises
        ValueError if no plan is left, or if an override is wrong. An override for layers must contain an MoE layer, and
        no layer beyond the last MoE layer. An override for rows must contain a row count in which the policy selects.
        """
        if self.observed:
            return list(dict.fromkeys(plan for part in self.parts for plan in part.plans(model_layers)))
        first, last = (min(model_layers), max(model_layers)) if model_layers else (0, math.inf)
        for override in self.layer_overrides:
            if override.last > last:
                raise ValueError(f"layers {override.last}: must be one of the model's layers, 0 to {last}")
            if model_layers is not None and not any(layer in override for layer in model_layers):
                place = f"layers {override.first} to {override.last}"
                raise ValueError(f"{place}: must contain an MoE layer; the model's are {first} to {last}")
        for override in self.by_rows:
            if override.last < self.min_rows or override.first > (self.max_rows or override.first):
                limits = f"from min_rows = {self.min_rows}"
                limits += "" if self.max_rows is None else f" to max_rows = {self.max_rows}"
                raise ValueError(f"by_rows {override.first}: must overlap the rows {limits}")
        starts = sorted({0, *_boundaries(self.layer_overrides)})
        # All layers from one start until the next have the same overrides.
        layers = starts if model_layers is None else {starts[bisect(starts, layer) - 1] for layer in model_layers}
        ends = {self.min_rows, *_boundaries(self.sizes)}
        sizes = [rows for rows in ends if self.reason_to_skip(self.phases[0], rows) is None]
        found = (self.plan(layer, rows) for layer in layers for rows in sizes)
        plans = [plan for plan in dict.fromkeys(found) if plan is not None]
        if not plans:
            raise ValueError("layers and by_rows: must leave the policy a layer and batch size (got vanilla for all)")
        return plans


def build_schedule(
    name: str, config: dict[str, Any], speculative: bool, speculates: str = SPECULATES, pages: bool = False
) -> Schedule | None:
    """Return the schedule of a policy, or None for `vanilla`. The name, keys and common keys are validated first.

    `speculative` is True if the server uses speculative decoding. An error may name `speculates`, the flag that
    switches on speculative decoding. `pages` is True if the server pages experts. The default of `min_rows` is then
    1, because with paged experts a policy also helps a step of one row. Raises ValueError naming the key, the value and
    what is allowed.
    """
    policy = get_policy(name)
    if "policy" in config:
        only = "must stand in an override only; --expert-policy names the policy"
        raise ValueError(f"policy = {as_json(config['policy'])}: {only}")
    if name == "vanilla":
        if config:
            raise ValueError(f"{shorten(next(iter(config)))}: must be absent, because vanilla has no keys")
        return None
    if name == "observe":
        return _build_observing(config, speculative, speculates, pages)
    keys = {key: value for key, value in config.items() if key not in COMMON_KEYS}
    policy.check_names(keys, others=COMMON_KEYS)
    fewest = 1 if pages else COMMON_KEYS["min_rows"].default
    schedule = Schedule(
        policy=name,
        keys=keys or dict(policy.bare),
        phases=read_phases(config.get("phases"), policy, keys, speculative, speculates),
        min_rows=COMMON_KEYS["min_rows"].check("min_rows", config.get("min_rows", fewest)),
        max_rows=COMMON_KEYS["max_rows"].check("max_rows", config["max_rows"]) if "max_rows" in config else None,
        layers=read_overrides("layers", config.get("layers", {}), lowest=0),
        by_rows=read_overrides("by_rows", config.get("by_rows", {}), lowest=1),
        rows=COMMON_KEYS["rows"].check("rows", config.get("rows", COMMON_KEYS["rows"].default)),
        exact=read_rule(config["exact"]) if "exact" in config else Rule(),
        given={"policy": name, **config},
    )
    ranges = len(schedule.by_rows) + len(schedule.layer_overrides)
    if ranges > MOST_RANGES:
        raise ValueError(f"layers and by_rows: must have at most {MOST_RANGES:,} ranges together (got {ranges:,})")
    parts = len(_boundaries(schedule.layer_overrides)) * len(_boundaries(schedule.by_rows))
    if parts > MOST_PARTS:
        divided = f"must divide layers and rows into at most {MOST_PARTS:,} parts (got {parts:,})"
        raise ValueError(f"layers and by_rows: {divided}")
    if schedule.max_rows is not None and schedule.max_rows < schedule.min_rows:
        raise ValueError(f"max_rows = {schedule.max_rows}: must be at least min_rows = {schedule.min_rows}")
    for plan in schedule.plans():
        if plan.k0 == 0 and not (plan.adds or plan.ranks_experts or plan.confidence):
            raise ValueError(
                "k0 = 0: must be at least 1 without a budget (add, mass, ...), because no expert would be selected"
            )
        _check_requests(plan, speculative)
    return schedule


def _build_observing(config: dict[str, Any], speculative: bool, speculates: str, pages: bool) -> Schedule:
    """Return the schedule of `observe`. It is vanilla in every step, and it contains the compared schedules."""
    policy = get_policy("observe")
    policy.check_names(config)
    observed: dict[str, Schedule] = {}
    plans = policy.resolve(config)["plans"]
    if len(plans) > MOST_PLANS:
        raise ValueError(f"plans: must be at most {MOST_PLANS} policies (got {len(plans):,})")
    for plan in plans:
        text = plan if isinstance(plan, str) else json.dumps(plan)
        try:
            name, keys = _read_observed(plan)
            schedule = build_schedule(name, keys, speculative, speculates, pages)
            spelling = spell_policy(name, keys)  # the same for texts that differ only in spaces
            if schedule is None or schedule.observed or spelling in observed:
                raise ValueError("must be a policy that selects, given once")
            if schedule.rows != "batch":
                raise ValueError(f"rows = {schedule.rows!r}: must be 'batch' under observe")
            if schedule.exact != Rule():
                raise ValueError(f"exact = {as_json(schedule.given['exact'])}: must be absent under observe")
            if schedule.estimates:
                raise ValueError(f"acceptance = {AUTO!r}: must be a number under observe")
        except ValueError as error:
            raise ValueError(f"plans: {shorten(text)}: {error}") from None
        observed[spelling] = schedule
    given = {"policy": "observe", **config}
    return Schedule("observe", dict(config), PHASES, min_rows=1, observed=observed, given=given)


def _read_observed(plan: Any) -> tuple[str, dict[str, Any]]:
    """Return the policy and the keys of an entry of `plans`. The entry is a text or an object with a key "policy"."""
    if isinstance(plan, str):
        return parse_policy(plan)
    if not isinstance(plan, dict) or "policy" not in plan:
        raise ValueError('must be a spelling such as "oea:k0=3", or an object such as {"policy": "oea", "k0": 3}')
    return plan["policy"], {key: value for key, value in plan.items() if key != "policy"}


def _check_requests(plan: SelectionPlan, speculative: bool) -> None:
    """Raise ValueError if a plan for plain decode has keys for draft tokens or for requests.

    In plain decode each row is a request of its own.
    """
    if speculative:
        return
    for name, default in (("acceptance", 1), ("warm_rows", None)):
        if (value := getattr(plan, name)) != default:
            value = repr(AUTO) if name == "acceptance" and plan.estimates else value
            raise ValueError(f"{name} = {value}: must be used with speculative decoding, because it is about drafts")
    reason = "without speculative decoding every row would be a request of its own"
    if plan.add_per_request:
        raise ValueError(
            f"add_per_request = {plan.add_per_request}: must be 0, because {reason}; use add, a budget of the batch"
        )
    if plan.scope == "request":
        raise ValueError(f"scope = 'request': must be 'batch', because {reason}")


def _boundaries(overrides: tuple[Override, ...]) -> set[int]:
    """Return layer ids or row counts, at least one from every range in which the same overrides apply."""
    return {n for override in overrides for n in (override.first, override.last, override.last + 1)}
