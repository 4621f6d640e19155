"""The figures on /metrics, and an exporter that creates a prometheus metric for each figure."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Literal

from .interval import Interval

PREFIX = "sglang:expert_policy_"
Values = Mapping[tuple[str, ...], float | None]


@dataclass(frozen=True)
class Figure:
    """A figure on /metrics: a counter or a gauge.

    `value` is a function that computes the figure's number from the data of its group in `FIGURES`. It returns None if
    there is no number to report. A counter adds up the numbers, and a gauge shows the last number.

    A figure with `labels` has one series for each combination of label values, and `value` returns a number for each
    combination. If a combination is missing from the result, a gauge drops its series. SGLang's own labels come before
    `labels`.
    """

    kind: Literal["counter", "gauge"]
    name: str
    text: str
    value: Callable[[Any], float | Values | None]
    labels: tuple[str, ...] = ()


def hash_plan(plan: Mapping[str, Any]) -> str:
    """Return a hash of a policy's description in 8 hex digits. Reports show it instead of a long description."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:8]


def _show(part: tuple[Mapping[str, Any] | None, float | None]) -> Values:
    plan = part[0]
    return {} if plan is None else {(plan["policy"], hash_plan(plan)): 1}


def _read_plans(total: str) -> Callable[[Mapping[str, Interval]], Values]:
    return lambda plans: {(plan,): getattr(interval, total) for plan, interval in plans.items()}


def _by_size(name: str, factor: float = 1.0) -> Callable[[Sequence[Mapping[str, Any]]], Values]:
    # A size without a value has no series, because after a switch the series would show the previous policy's value.
    return lambda sizes: {(str(one["batch_size"]),): one[name] * factor for one in sizes if one[name] is not None}


by_plan = partial(Figure, "counter", labels=("plan",))
counter, gauge, of = partial(Figure, "counter"), partial(Figure, "gauge"), attrgetter
VANILLAS, FULLEST = "that vanilla routing would have activated", "on the expert-parallel rank that has most"
HASH = "the hash of its description in GET /expert_policy"
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
    # The data is a pair of the plan and the estimated chance that a draft is accepted. Each may be None. `info` is a
    # gauge, because the Info type of prometheus_client does not support the multiprocess mode.
    "in force": (
        gauge("info", f"1 for the active policy, with {HASH}", _show, ("policy", "plan_hash")),
        gauge("acceptance", 'Estimated chance of a draft, by which `acceptance` "auto" weighs', itemgetter(1)),
    ),
    # The data is the list `batch_sizes` from `draft_depth` in the answer to GET /expert_policy. Only a server that
    # chooses the draft depth by tokens per second has this data.
    "depth": (
        gauge("draft_depth", "Drafts a request and step", _by_size("depth"), ("batch_size",)),
        gauge("draft_tokens", "Tokens that a step gives a request at that depth", _by_size("tokens"), ("batch_size",)),
        gauge("draft_step_seconds", "Time of a step at that depth", _by_size("ms", 1e-3), ("batch_size",)),
    ),
    "observed": (
        by_plan("observed_experts", f"Experts that a plan would have kept active, {SUM}", _read_plans("experts_after")),
        by_plan("observed_page_ins", f"Experts that a plan would have paged in, {SUM}", _read_plans("page_ins")),
        by_plan("observed_mass", f"Mass that a plan would have kept, {ROW_SUM}", _read_plans("kept_mass")),
    ),
    "compared": (
        counter("rank_comparisons", "Comparisons of the experts that ranks selected", itemgetter("comparisons")),
        counter("rank_disagreements", "Ranks that differed from the first, by comparison", itemgetter("disagreements")),
        counter("vanilla_fallbacks", "Switches to vanilla because ranks disagreed", itemgetter("fallbacks")),
    ),
}
"""The figures of each group. All figures of a group are computed from the same data."""


class Exporter:
    """The prometheus metrics of all figures.

    Each metric is created at its first export. At that time prometheus is already in multiprocess mode.
    """

    def __init__(self) -> None:
        self._metrics: dict[Figure, Any] = {}
        self._shown: dict[Figure, Values] = {}

    def export(self, group: str, part: Any, labels: dict[str, Any]) -> None:
        """Update the counters and gauges of one group of `FIGURES`.

        `part` is the data of the group, and `labels` contains SGLang's own labels.
        """
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
            # In multiprocess mode a removed series stays in the file from which /metrics is made. prometheus exports
            # the value with the latest timestamp, so it never exports a value without a timestamp.
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
