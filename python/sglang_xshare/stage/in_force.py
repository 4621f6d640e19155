"""The policy in force: everything that follows from a schedule, until a switch assigns the next."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..policies import VANILLA, bounds
from ..policies.description import describe
from ..policies.exact import Rule
from ..policies.plan import SelectionPlan
from ..policies.schedule import Schedule
from ..policies.spelling import spell_policy
from ..selection.cpu_call import Call
from ..upstream.batches import Batches
from .evidence.figures import hash_plan
from .evidence.metadata import Forward
from .frame import Assignment
from .gather import Ranks
from .lane import Lane
from .layer import Layer
from .step import StepKey

REASONS = ("vanilla", "phase", "min_rows", "max_rows", "unchanged", "override")
"""Why a layer has no plan. A step in which no layer has one is counted under the first of these that holds for some
layer: the first four hold for all layers alike, "override" is last, since it may hold for a few alone.
"""
LONGEST = 100
"""Characters of a policy in a response; a front of `xshare` with all its keys takes 60."""


@dataclass(frozen=True, eq=False)
class InForce:
    """The plans of a schedule for `layers` of a server with these `batches`, and how reports name them.

    `schedule` is None if the model routes as ever; with `masks`, padding rows alone are masked then. `ranks` are those
    of a server whose ranks each route rows of their own, as the schedule selects among them. `rule` says which arriving
    requests are exact. `lanes` are those of `observe`. `is_named` is False from a start without a policy until
    the first switch: reports then name none.
    """

    schedule: Schedule | None
    batches: Batches = Batches()  # noqa: RUF009 - it never changes
    masks: bool = False
    layers: Sequence[Layer] = ()
    ranks: Ranks | None = None
    rule: Rule = Rule()  # noqa: RUF009 - it never changes
    lanes: Sequence[Lane] = ()
    is_named: bool = True

    @cached_property
    def assigned(self) -> dict[StepKey, tuple[list[Assignment], set[str | None]]]:
        """What `graphs.assign` has returned of steps without padding and exact rows."""
        return {}

    @cached_property
    def calls(self) -> dict[tuple[object, ...], tuple[SelectionPlan, Call | None]]:
        """What selects on a CPU, by layer, plan and shape of a step; see `Layer`."""
        return {}

    @cached_property
    def _found(self) -> dict[tuple[Layer, StepKey], tuple[SelectionPlan | None, str | None]]:
        return {}

    @cached_property
    def _fitting(self) -> dict[tuple[Layer, StepKey, int | None], bool]:
        return {}

    @cached_property
    def _acting(self) -> dict[StepKey, bool]:
        return {}

    @property
    def observes(self) -> bool:
        """Whether plans select beside the model alone."""
        return self.schedule is not None and bool(self.schedule.observed)

    @property
    def masks_only(self) -> bool:
        """Whether padding rows are masked, and nothing else is done."""
        return self.masks and self.schedule is None

    @cached_property
    def by_depth(self) -> bool:
        """Whether some plan asks how deep drafts are."""
        found = [] if self.schedule is None else self.schedule.plans()
        return any(plan.by_depth for plan in found)

    @cached_property
    def given(self) -> dict[str, Any]:
        """The policy and its keys as given, JSON-able; a policy given without keys has its defaults."""
        if self.schedule is None:
            return {"policy": "vanilla"}
        return {"policy": self.schedule.policy, **self.schedule.keys, **self.schedule.given}

    @cached_property
    def description(self) -> dict[str, Any]:
        """The policy with every default resolved, JSON-able."""
        return {"policy": "vanilla"} if self.schedule is None else describe(self.schedule, self.layers[0].router.top_k)

    @property
    def plan(self) -> dict[str, Any] | None:
        """The description, for reports; None until a policy has been in force."""
        return self.description if self.is_named else None

    @cached_property
    def hash(self) -> str:
        """The description's hash."""
        return hash_plan(self.description)

    @cached_property
    def spelling(self) -> str | None:
        """The policy as responses name it, by its hash if it is long, such as a tuned one; None until a policy has been
        in force.
        """
        if not self.is_named:
            return None
        keys = dict(self.given)
        spelling = spell_policy(keys.pop("policy"), keys)
        return spelling if len(spelling) <= LONGEST else f"{self.description['policy']}, plan {self.hash}"

    def name_outcome(self, reasons: set[str | None]) -> str:
        """Name an eager forward's outcome: `reasons` why layers have no plan, None if one has; empty in a prefill."""
        if not reasons:
            return "prefill"
        if None in reasons:
            return "observed" if self.observes else "policy"
        return next(reason for reason in REASONS if reason in reasons)

    def tell(self, outcome: str | None, replayed: StepKey | None) -> Forward | None:
        """Return what the requests of a forward count, by its outcome; of a replay, which the stage does not see, by
        the size of its graph. None until a policy has been in force.
        """
        if self.spelling is None:
            return None
        if outcome is None:
            return Forward(self.spelling, replayed is not None, replayed is not None and self.acts(replayed))
        return Forward(self.spelling, outcome != "prefill", outcome == "policy" and self.schedule is not None)

    def acts(self, key: StepKey) -> bool:
        """Whether some layer selects by the policy in a step of this size."""
        if self.schedule is None or self.observes:
            return False
        if key not in self._acting:
            self._acting[key] = any(self.find(layer, key)[0] for layer in self.layers)
        return self._acting[key]

    def find(self, layer: Layer, key: StepKey) -> tuple[SelectionPlan | None, str | None]:
        """(a layer's plan in a step of this size, None), or (None, why it has none)."""
        if (layer, key) not in self._found:
            self._found[layer, key] = self._choose(layer, key)
        return self._found[layer, key]

    def fit(self, layer: Layer, key: StepKey) -> bool:
        """Whether no more of a layer's experts than it has slots are active in such a step, whatever the logits."""
        slots = layer.num_slots  # which SGLang may size only after the first question
        if (layer, key, slots) not in self._fitting:
            plan, step = self.find(layer, key)[0], (key.rows, key.tokens_per_request)
            self._fitting[layer, key, slots] = slots is None or bounds.fits_slots(
                plan, layer.router, layer.paging.num_experts, *step, slots
            )
        return self._fitting[layer, key, slots]

    def fits_slots(self, rows: int) -> bool:
        """Return whether every layer fits its slots in a decode step of so many rows, whatever the logits."""
        return all(self.fit(layer, StepKey("decode", rows)) for layer in self.layers)

    def _choose(self, layer: Layer, key: StepKey) -> tuple[SelectionPlan | None, str | None]:
        phase, rows, tokens_per_request = key
        if self.schedule is None:
            if not self.masks:
                return None, "vanilla"
            return (VANILLA, None) if self.batches.pad(rows) else (None, "unchanged")
        reason = self.schedule.reason_to_skip(phase, rows)
        if reason is not None:
            return None, reason
        plan = self.schedule.plan(layer.layer_id, rows)
        if plan is None:
            return None, "override"
        # A plan that cannot change what the model does is none, unless it masks padding or is compared.
        is_needed = self.schedule.observed or self.batches.pad(rows)
        # A layer knows its experts only when it routes. Of ever so many, a plan is taken to change no less.
        slots = layer.num_slots
        if not is_needed and not bounds.can_change(
            plan, layer.router, sys.maxsize, rows, tokens_per_request, slots=slots
        ):
            return None, "unchanged"
        return plan, None
