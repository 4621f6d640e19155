"""The active policy: everything that follows from a schedule, until a switch assigns the next value."""

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
"""The most characters of a policy with its keys in a response; the keys that `tune` searches take 60."""


@dataclass(frozen=True, eq=False)
class InForce:
    """The plans of a schedule for the `layers` of a server with these `batches`, and their names in reports.

    `schedule` is None if the model routes; then padding rows are masked if `masks` is set. `ranks` describe a server
    whose ranks each route their own rows. `rule` decides which arriving requests are exact. `lanes` are the observed
    lanes of `observe`. `is_named` is False after a start without a policy, until the first switch: reports then name no
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

    # Caches. With init=False they are empty after `dataclasses.replace`.
    _assigned: dict[tuple[StepKey, int | None], list[Assignment]] = field(default_factory=dict, init=False)
    _outcomes: dict[StepKey, str] = field(default_factory=dict, init=False)
    _forwards: dict[str, Forward] = field(default_factory=dict, init=False)

    @property
    def observes(self) -> bool:
        """True under `observe`: plans select, and the model routes."""
        return self.schedule is not None and bool(self.schedule.observed)

    @cached_property
    def by_depth(self) -> bool:
        """True if some plan reads the depth of drafts."""
        found = [] if self.schedule is None else self.schedule.plans()
        return any(plan.by_depth for plan in found)

    @cached_property
    def given(self) -> dict[str, Any]:
        """The policy and its keys as given, JSON-able, completed by the defaults of a bare policy."""
        if self.schedule is None:
            return {"policy": "vanilla"}
        return {"policy": self.schedule.policy, **self.schedule.keys, **self.schedule.given}

    @cached_property
    def description(self) -> dict[str, Any]:
        """The policy with every default resolved, JSON-able."""
        return {"policy": "vanilla"} if self.schedule is None else describe(self.schedule, self.layers[0].router.top_k)

    @property
    def plan(self) -> dict[str, Any] | None:
        """The description, for reports; None until a policy has been active."""
        return self.description if self.is_named else None

    @cached_property
    def hash(self) -> str:
        """The description's hash."""
        return hash_plan(self.description)

    @cached_property
    def spelling(self) -> str | None:
        """The policy's name in responses; None until a policy has been active.

        If the keys are long, such as a tuned policy's, the plan's hash replaces them.
        """
        if not self.is_named:
            return None
        keys = dict(self.given)
        spelling = spell_policy(keys.pop("policy"), keys)
        return spelling if len(spelling) <= LONGEST else f"{self.description['policy']}, plan {self.hash}"

    def find_outcome(self, key: StepKey | None) -> str:
        """Return the outcome of a forward by its `key`: None for a prefill, the graph's key for a replay."""
        if key is None:
            return "prefill"
        if key not in self._outcomes:  # found once: the reasons of 48 layers take 2 us
            reasons = {one.reason for one in self.assign(key)}
            acts = "observed" if self.observes else "policy"  # if some layer has a plan, which has no reason
            self._outcomes[key] = acts if None in reasons else next(one for one in REASONS if one in reasons)
        return self._outcomes[key]

    def describe_forward(self, outcome: str) -> Forward | None:
        """Return what the requests of a forward with this outcome count; None until a policy has been active."""
        if outcome not in self._forwards and self.spelling is not None:
            acts = outcome == "policy" and self.schedule is not None  # without a schedule only padding is masked
            self._forwards[outcome] = Forward(self.spelling, outcome != "prefill", acts)
        return self._forwards.get(outcome)

    def find(self, layer: Layer, key: StepKey) -> Assignment:
        """Return a layer's assignment in an eager step of this size."""
        plan, reason = self._choose(layer, key)
        slots, size = layer.paging_slots, (key.rows, key.tokens_per_request)
        fits = slots is None or bounds.fits_slots(plan, layer.router, layer.paging.num_experts, *size, slots)
        if plan is None or self.schedule is None or not self.schedule.observed:
            return Assignment(plan, reason, fits=fits)
        observed = self.schedule.plans_for(layer.layer_id, key.phase, key.rows)
        return Assignment(plan, fits=fits, observed=tuple(observed))

    def assign(self, key: StepKey) -> list[Assignment]:
        """Return the assignment of each layer in an eager step of this size."""
        place = key, self.layers[0].paging_slots  # SGLang may size the page slots only after the first call
        if place not in self._assigned:
            self._assigned[place] = [self.find(layer, key) for layer in self.layers]
        return self._assigned[place]

    def fits(self, key: StepKey) -> bool:
        """Return whether each layer's page slots hold all active experts of a step of this size, for all logits."""
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
        # A plan that cannot change the model's routing is skipped, unless it masks padding or is compared.
        is_needed = self.observes or self.batches.may_pad(rows)
        # The number of experts is unknown here; assuming the maximum is conservative.
        slots = layer.paging_slots
        if not is_needed and not bounds.can_change(
            plan, layer.router, sys.maxsize, rows, tokens_per_request, slots=slots
        ):
            return None, "unchanged"
        return plan, None
