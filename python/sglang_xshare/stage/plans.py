"""What each layer does in each step by one schedule: the plans in force, until a switch puts others in their place."""

import sys
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from ..policies import VANILLA, bounds
from ..policies.description import describe
from ..policies.plan import SelectionPlan
from ..policies.schedule import Schedule
from ..upstream.batches import Batches
from .layer import Assignment, Layer
from .step import StepKey

REASONS = ("vanilla", "phase", "min_rows", "max_rows", "unchanged", "override")
"""Why a layer has no plan. A step in which no layer has one is counted under the first of these that holds for some
layer: the first four hold for all layers alike, "override" is last, since it may hold for a few alone.
"""


class Plans:
    """The plans of a schedule for a server with these `batches`; they never change. `schedule` is None where the model
    routes as ever; with `masks`, padding rows alone are masked then.
    """

    def __init__(self, schedule: Schedule | None, batches: Batches = Batches(), masks: bool = False) -> None:  # noqa: B008
        self.schedule = schedule
        self.batches = batches
        self.masks = masks and schedule is None
        self._found: dict[tuple[Layer, StepKey], tuple[SelectionPlan | None, str | None]] = {}
        self._fitting: dict[tuple[Layer, StepKey, int | None], bool] = {}
        self._acting: dict[StepKey, bool] = {}
        self.assigned: dict[StepKey, list[tuple[Assignment, str | None]]] = {}
        """What `assign` has decided of plain steps."""

    @cached_property
    def by_depth(self) -> bool:
        """Whether some plan asks how deep drafts are."""
        found = [] if self.schedule is None else self.schedule.plans()
        return any(plan.by_depth for plan in found)

    @property
    def given(self) -> dict[str, Any]:
        """The policy and its keys as given, JSON-able; a policy given without keys has its defaults."""
        if self.schedule is None:
            return {"policy": "vanilla"}
        return {"policy": self.schedule.policy, **self.schedule.keys, **self.schedule.given}

    def describe(self, top_k: int) -> dict[str, Any]:
        """The plan in force, every default resolved."""
        return {"policy": "vanilla"} if self.schedule is None else describe(self.schedule, top_k)

    def act(self, layers: Iterable[Layer], key: StepKey) -> bool:
        """Whether some of a model's layers has a plan in a step of this size: always of the same layers."""
        if key not in self._acting:
            self._acting[key] = any(self.find(layer, key)[0] for layer in layers)
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
