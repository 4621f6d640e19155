"""Every figure on /metrics: one table, and the exporter that makes prometheus metrics of it."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Literal

from .interval import Interval

PREFIX = "sglang:expert_policy_"
Values = Mapping[tuple[str, ...], float | None]


@dataclass(frozen=True)
class Figure:
    """`value` of what was read since the last export: a number, None where there is none. A counter adds it up, a gauge
    is the last. With `labels` of its own, beside those that every figure of SGLang's has, a number for each of their
    values: of a gauge no other series stays.
    """

    kind: Literal["counter", "gauge"]
    name: str
    text: str
    value: Callable[[Any], float | Values | None]
    labels: tuple[str, ...] = ()


def hash_plan(plan: Mapping[str, Any]) -> str:
    """8 hex digits of a plan in force, as JSON-able: what tells it from others where it is too long to show."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:8]


def _show(part: tuple[Mapping[str, Any] | None, float | None]) -> Values:
    plan = part[0]
    return {} if plan is None else {(plan["policy"], hash_plan(plan)): 1}


def _by_plan(total: str) -> Callable[[Mapping[str, Interval]], Values]:
    return lambda plans: {(plan,): getattr(interval, total) for plan, interval in plans.items()}


counter, gauge, of = partial(Figure, "counter"), partial(Figure, "gauge"), attrgetter
VANILLAS, FULLEST = "that vanilla routing would have activated", "on the expert-parallel rank that has most"
SUM, ROW_SUM = "summed over layers and steps", "summed over rows, layers and steps"

FIGURES: dict[str, tuple[Figure, ...]] = {
    "counted": (
        counter("layer_steps", "MoE layer calls under an expert policy", of("layer_steps")),
        counter("experts_before", f"Experts {VANILLAS}, {SUM}", of("experts_before")),
        counter("experts_after", f"Active experts, {SUM}", of("experts_after")),
        counter("kept_mass", f"Kept mass, {ROW_SUM}", of("kept_mass")),
        counter("rows", f"Live router rows, {SUM}", of("rows")),
        counter("exact_rows", f"Live router rows of exact requests, {SUM}", of("exact_rows")),
        counter("page_ins_before", f"Experts that vanilla routing would have paged in, {SUM}", of("page_ins_before")),
        counter("page_ins", f"Experts paged in, {SUM}", of("page_ins")),
        counter("rescued_rows", "Rows given back their top-1 expert by rescue", of("rescued")),
        counter("fullest_rank_experts_before", f"Experts {VANILLAS} {FULLEST}, {SUM}", of("fullest_before")),
        counter("fullest_rank_experts_after", f"Experts that are active {FULLEST}, {SUM}", of("fullest_after")),
        counter(
            "steps",
            "Forwards of the target model, by outcome",
            lambda interval: {(outcome,): count for outcome, count in interval.outcomes.items()},
            ("outcome",),
        ),
    ),
    # Of (plan, a draft's chance), either None. Prometheus has an Info of its own, but not in multiprocess mode.
    "in force": (
        gauge(
            "info",
            "1 of the plan in force: its policy, and a hash of what GET /expert_policy tells of it",
            _show,
            ("policy", "plan_hash"),
        ),
        gauge("acceptance", 'Chance of a draft as estimated, which `acceptance` "auto" weighs by', itemgetter(1)),
    ),
    "observed": (
        counter(
            "observed_experts",
            f"Experts that a plan would have kept active, {SUM}",
            _by_plan("experts_after"),
            ("plan",),
        ),
        counter(
            "observed_page_ins", f"Experts that a plan would have paged in, {SUM}", _by_plan("page_ins"), ("plan",)
        ),
        counter("observed_mass", f"Mass that a plan would have kept, {ROW_SUM}", _by_plan("kept_mass"), ("plan",)),
    ),
    "compared": (
        counter(
            "rank_comparisons", "Times that ranks have compared which experts they selected", itemgetter("comparisons")
        ),
        counter(
            "rank_disagreements",
            "Times that a rank had selected other experts than the first one",
            itemgetter("disagreements"),
        ),
        counter(
            "vanilla_fallbacks", "Times that it was switched to vanilla since ranks disagreed", itemgetter("fallbacks")
        ),
    ),
}
"""By what is read, and handed to the exporter."""


class Exporter:
    """Keeps the prometheus metrics, made at their first export: prometheus must be in multiprocess mode by then."""

    def __init__(self) -> None:
        self._metrics: dict[Figure, Any] = {}
        self._shown: dict[Figure, Values] = {}

    def export(self, group: str, part: Any, labels: dict[str, Any]) -> None:
        """Add what was read of a group of `FIGURES` to its counters, and set its gauges. `labels` are upstream's."""
        for figure in FIGURES[group]:
            if figure not in self._metrics:
                self._metrics[figure] = _make_metric(figure, tuple(labels))
            self._export(figure, self._metrics[figure], figure.value(part), labels)

    def _export(self, figure: Figure, metric: Any, found: float | Values | None, labels: dict[str, Any]) -> None:
        numbers: Values = found if isinstance(found, Mapping) else {(): found}
        for own, number in numbers.items():
            if number is not None:
                child = metric.labels(*labels.values(), *own)
                child.inc(number) if figure.kind == "counter" else child.set(number)
        if figure.kind == "gauge":
            # In multiprocess mode a removed series stays in the file that /metrics is made of. But there the latest
            # value is exported, and one without a time never is.
            for own in self._shown.get(figure, {}).keys() - numbers.keys():
                if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
                    metric.labels(*labels.values(), *own)._value.set(0.0, timestamp=None)
                else:
                    metric.remove(*labels.values(), *own)
            self._shown[figure] = numbers


def _make_metric(figure: Figure, labels: tuple[str, ...]) -> Any:
    from prometheus_client import Counter, Gauge

    name, labels = PREFIX + figure.name, (*labels, *figure.labels)
    if figure.kind == "counter":
        return Counter(name, figure.text, labels)
    return Gauge(name, figure.text, labels, multiprocess_mode="mostrecent")
