"""The active policy and all values that follow from it. A switch replaces the whole object."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..policies import VANILLA, bounds
from ..policies.description import describe
from ..policies.exact import Rule
from ..policies.plan import SelectionPlan
from ..policies.schedule import Schedule
from ..policies.spelling import spell_policy
from ..upstream.batches import Batches
from .frame import Assignment
from .gather import Ranks
from .lane import Lane
from .layer import Layer
from .record.figures import hash_plan
from .record.interval import REASONS
from .record.metadata import Forward
from .step import StepKey

LONGEST = 100
"""The maximum length of a policy's spelling in a response. The keys that `tune` searches take 60 characters."""


@dataclass(frozen=True, eq=False)
class InForce:
    """The active policy: its plan for each layer and batch size, and its names in reports.

    - `schedule`: the policy's schedule, or None if the model routes by itself.
    - `batches`: the batch sizes that the server's steps can have.
    - `masks`: padding rows are masked even if `schedule` is None.
    - `ranks`: describes a server in which each rank routes its own rows. It is None for any other server.
    - `rule`: decides which arriving requests are exact.
    - `lanes`: the observed lanes, one for each plan that `observe` compares.
    - `is_named`: False until the first switch of a server that has started without a policy. Reports then contain no
      policy.
    """

    schedule: Schedule | None
    batches: Batches = field(default_factory=Batches)
    masks: bool = False
    layers: Sequence[Layer] = ()
    ranks: Ranks | None = None
    rule: Rule = field(default_factory=Rule)
    lanes: Sequence[Lane] = ()
    is_named: bool = True

    # These fields are caches. Because of init=False they are empty again after `dataclasses.replace`.
    _assigned: dict[tuple[StepKey, int | None], list[Assignment]] = field(default_factory=dict, init=False)
    _outcomes: dict[tuple[StepKey, int | None], str] = field(default_factory=dict, init=False)
    _forwards: dict[str, Forward] = field(default_factory=dict, init=False)

    @property
    def observes(self) -> bool:
        """True under `observe`: the model routes by itself, and the stage only counts what the plans would select."""
        return self.schedule is not None and bool(self.schedule.observed)

    @cached_property
    def by_depth(self) -> bool:
        """True if any plan reads the depth of draft tokens."""
        found = [] if self.schedule is None else self.schedule.plans()
        return any(plan.by_depth for plan in found)

    @cached_property
    def given(self) -> dict[str, Any]:
        """The policy and its keys as the user gave them, in JSON types.

        If the user gave no keys, the policy's default keys are included.
        """
        if self.schedule is None:
            return {"policy": "vanilla"}
        return {"policy": self.schedule.policy, **self.schedule.keys, **self.schedule.given}

    @cached_property
    def description(self) -> dict[str, Any]:
        """The policy with all of its keys, including default values, in JSON types."""
        return {"policy": "vanilla"} if self.schedule is None else describe(self.schedule, self.layers[0].router.top_k)

    @property
    def shown(self) -> dict[str, Any] | None:
        """The description for reports, or None if no policy has been active yet."""
        return self.description if self.is_named else None

    @cached_property
    def hash(self) -> str:
        """The hash of `description`, which identifies the policy."""
        return hash_plan(self.description)

    @cached_property
    def spelling(self) -> str | None:
        """The policy and its keys in one line for responses, or None if no policy has been active yet.

        If the line would be longer than `LONGEST`, the hash of the policy replaces the keys.
        """
        if not self.is_named:
            return None
        keys = dict(self.given)
        spelling = spell_policy(keys.pop("policy"), keys)
        return spelling if len(spelling) <= LONGEST else f"{self.description['policy']}, plan {self.hash}"

    def find_outcome(self, key: StepKey | None) -> str:
        """Return the outcome under which a forward is counted.

        `key` is the key of the step, or the key of the graph in a replay. It is None for a prefill.
        """
        if key is None:
            return "prefill"
        which = self._cache_key(key)
        if which not in self._outcomes:  # cached, because reading the reasons of 48 layers takes 2 us
            reasons = {one.reason for one in self.assign(key)}
            acts = "observed" if self.observes else "policy"  # the outcome if some layer has a plan
            self._outcomes[which] = acts if None in reasons else next(one for one in REASONS if one in reasons)
        return self._outcomes[which]

    def describe_forward(self, outcome: str) -> Forward | None:
        """Return the record of a forward with this outcome, or None if no policy has been active yet.

        The scheduler counts this record for each request of the forward.
        """
        if outcome not in self._forwards and self.spelling is not None:
            acts = outcome == "policy" and self.schedule is not None  # without a schedule only padding is masked
            self._forwards[outcome] = Forward(self.spelling, outcome != "prefill", acts)
        return self._forwards.get(outcome)

    def find(self, layer: Layer, key: StepKey) -> Assignment:
        """Return the assignment of a layer in an eager step with this key."""
        plan, reason = self._choose(layer, key)
        slots, size = layer.paging_slots, (key.rows, key.tokens_per_request)
        fits = slots is None or bounds.fits_slots(plan, layer.router, layer.paging.num_experts, *size, slots)
        if plan is None or self.schedule is None or not self.schedule.observed:
            return Assignment(plan, reason, fits=fits)
        observed = self.schedule.plans_for(layer.layer_id, key.phase, key.rows)
        return Assignment(plan, fits=fits, observed=tuple(observed))

    def assign(self, key: StepKey) -> list[Assignment]:
        """Return the assignment of each layer in an eager step with this key."""
        which = self._cache_key(key)
        if which not in self._assigned:
            self._assigned[which] = [self.find(layer, key) for layer in self.layers]
        return self._assigned[which]

    def _cache_key(self, key: StepKey) -> tuple[StepKey, int | None]:
        """Return the key of the caches. SGLang may set the number of page slots after the first call."""
        return key, self.layers[0].paging_slots

    def fits(self, key: StepKey) -> bool:
        """Return whether the active experts of a step with this key always fit the page slots of each layer."""
        return all(assignment.fits for assignment in self.assign(key))

    def _choose(self, layer: Layer, key: StepKey) -> tuple[SelectionPlan | None, str | None]:
        phase, rows, tokens_per_request = key
        if self.schedule is None:
            if not self.masks:
                return None, "vanilla"
            return (VANILLA, None) if self.batches.may_pad(rows) else (None, "unchanged")
        reason = self.schedule.reason_to_skip(phase, rows)
        if reason is not None:
            return None, reason
        plan = self.schedule.plan(layer.layer_id, rows)
        if plan is None:
            return None, "override"
        # Skip a plan that cannot change the model's routing, unless the plan masks padding rows or is observed.
        is_needed = self.observes or self.batches.may_pad(rows)
        # The number of experts is unknown here; assuming the maximum is conservative.
        slots = layer.paging_slots
        if not is_needed and not bounds.can_change(
            plan, layer.router, sys.maxsize, rows, tokens_per_request, slots=slots
        ):
            return None, "unchanged"
        return plan, None
