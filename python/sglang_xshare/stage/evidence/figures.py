"""Every figure on /metrics: one table, and the exporter that makes prometheus metrics of it."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Literal

from .agreement import Compared
from .balance import RankLoad
from .interval import Interval
from .observe import Observed

PREFIX = "sglang:expert_policy_"
Values = Mapping[tuple[str, ...], float | None]


@dataclass(frozen=True)
class InForce:
    """The plan in force as JSON-able, the one last exported, and a draft's chance; None where there is none."""

    plan: Mapping[str, Any] | None
    former: Mapping[str, Any] | None
    acceptance: float | None = None


@dataclass(frozen=True)
class Figure:
    """`value` of what was read since the last export: a number, None where there is none. A counter adds it up, a gauge
    is the last. With `labels` of its own, beside those that every figure of SGLang's has, a number for each of their
    values. One that `replaces` former ones has None for a series to remove.
    """

    kind: Literal["counter", "gauge"]
    name: str
    text: str
    value: Callable[[Any], float | Values | None]
    labels: tuple[str, ...] = ()
    replaces: bool = False


def hash_plan(plan: Mapping[str, Any]) -> str:
    """8 hex digits of a plan in force, as JSON-able: what tells it from others where it is too long to show."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:8]


def _show(part: InForce) -> Values:
    changes = [(part.former, None), (part.plan, 1)] if part.plan != part.former else []
    return {(plan["policy"], hash_plan(plan)): value for plan, value in changes if plan is not None}


def _mean(name: str) -> Callable[[Interval], float | None]:
    """Of an interval with steps; one without has no mean, and the former stays."""
    return lambda interval: getattr(interval, name) if interval.layer_steps else None


def _step_mean(name: str) -> Callable[[RankLoad], float | None]:
    return lambda load: getattr(load, name) / load.layer_steps if load.layer_steps else None


def _by_plan(value: Callable[[Interval], float | None]) -> Callable[[Observed], Values]:
    return lambda observed: {(plan,): value(interval) for plan, interval in observed.plans.items()}


counter, gauge, of = partial(Figure, "counter"), partial(Figure, "gauge"), attrgetter
VANILLAS, ACTIVE = "that vanilla routing would have activated", "Experts that are active"
FULLEST, MEAN = "on the expert-parallel rank that has most", "on the mean of expert-parallel ranks"
EXPERTS, MASS = "Experts that a plan would have kept active", "Mass that a plan would have kept"
SUM, ROW_SUM = "summed over layers and steps", "summed over rows, layers and steps"
LAST, STEP_MEAN = "last interval", "mean of a layer and step, last interval"

FIGURES: dict[type, tuple[Figure, ...]] = {
    Interval: (
        counter("layer_steps", "MoE layer calls under an expert policy", of("layer_steps")),
        counter("experts_before", f"Experts {VANILLAS}, {SUM}", of("experts_before")),
        counter("experts_after", f"Active experts, {SUM}", of("experts_after")),
        counter("kept_mass", f"Kept mass, {ROW_SUM}", of("kept_mass")),
        counter("rows", f"Live router rows, {SUM}", of("rows")),
        counter("exact_rows", f"Live router rows of exact requests, {SUM}", of("exact_rows")),
        counter("page_ins_before", f"Experts that vanilla routing would have paged in, {SUM}", of("page_ins_before")),
        counter("page_ins", f"Experts paged in, {SUM}", of("page_ins")),
        counter("rescued_rows", "Rows given back their top-1 expert by rescue", of("rescued")),
        counter(
            "steps",
            "Forwards of the target model, by outcome",
            lambda interval: {(outcome,): count for outcome, count in interval.outcomes.items()},
            ("outcome",),
        ),
        gauge("active_experts_before", f"Mean experts a layer and step {VANILLAS}, {LAST}", _mean("mean_before")),
        gauge("active_experts_after", f"Mean active experts a layer and step, {LAST}", _mean("mean_after")),
        gauge("mean_kept_mass", f"Mean kept mass of a row, {LAST}", _mean("mean_kept_mass")),
    ),
    InForce: (
        # Prometheus has an Info of its own, but not in multiprocess mode.
        gauge(
            "info",
            "1 of the plan in force: its policy, and a hash of what GET /expert_policy tells of it",
            _show,
            ("policy", "plan_hash"),
            replaces=True,
        ),
        gauge("acceptance", 'Chance of a draft as estimated, which `acceptance` "auto" weighs by', of("acceptance")),
    ),
    RankLoad: tuple(
        figure
        for rank, name, where in (("largest", "fullest_rank", FULLEST), ("mean", "mean_rank", MEAN))
        for when, which in (("before", f"Experts {VANILLAS}"), ("after", ACTIVE))
        for figure in (
            counter(f"{name}_experts_{when}", f"{which} {where}, {SUM}", of(f"{rank}_{when}")),
            gauge(f"{name}_active_experts_{when}", f"{which} {where}, {STEP_MEAN}", _step_mean(f"{rank}_{when}")),
        )
    ),
    Observed: (
        counter(
            "batch_sizes",
            "Observed steps, by live router rows",
            lambda observed: {(rows,): steps for rows, steps in observed.sizes.items()},
            ("rows",),
        ),
        counter("observed_experts", f"{EXPERTS}, {SUM}", _by_plan(of("experts_after")), ("plan",)),
        counter(
            "observed_page_ins", f"Experts that a plan would have paged in, {SUM}", _by_plan(of("page_ins")), ("plan",)
        ),
        counter("observed_mass", f"{MASS}, {ROW_SUM}", _by_plan(of("kept_mass")), ("plan",)),
        gauge("observed_active_experts", f"{EXPERTS}, {STEP_MEAN}", _by_plan(_mean("mean_after")), ("plan",)),
        gauge("observed_kept_mass", f"{MASS}, mean of a row, {LAST}", _by_plan(_mean("mean_kept_mass")), ("plan",)),
    ),
    Compared: (
        counter(
            "rank_comparisons",
            "Times that ranks have compared which experts they selected",
            of("comparisons"),
        ),
        counter(
            "rank_disagreements",
            "Times that a rank had selected other experts than the first one",
            lambda compared: sum(compared.disagreements),
        ),
        counter("vanilla_fallbacks", "Times that it was switched to vanilla since ranks disagreed", of("fallbacks")),
    ),
}
"""By what is read of the counters, and handed to the exporter."""


class Exporter:
    """Keeps the prometheus metrics, made at their first export: prometheus must be in multiprocess mode by then."""

    def __init__(self) -> None:
        self._metrics: dict[type, list[Any]] = {}

    def export(self, part: Any, labels: dict[str, Any]) -> None:
        """Add a part of `FIGURES` to its counters, and set its gauges. `labels` are upstream's. What was read is not
        read again: a refused value keeps no other from being exported, the first such error is raised at the end.
        """
        figures = FIGURES[type(part)]
        if type(part) not in self._metrics:
            self._metrics[type(part)] = [_make_metric(figure, tuple(labels)) for figure in figures]
        errors = []
        for figure, metric in zip(figures, self._metrics[type(part)], strict=True):
            try:
                _export(figure, metric, figure.value(part), labels)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _export(figure: Figure, metric: Any, found: float | Values | None, labels: dict[str, Any]) -> None:
    for own, number in found.items() if isinstance(found, Mapping) else [((), found)]:
        values = labels | dict(zip(figure.labels, own, strict=True))
        if number is not None:
            child = metric.labels(**values)
            child.inc(number) if figure.kind == "counter" else child.set(number)
        elif figure.replaces:
            _remove(metric, values)


def _remove(metric: Any, values: Mapping[str, Any]) -> None:
    """Remove a gauge's series. In multiprocess mode `remove` leaves it in the file that /metrics is made of; but there
    the most recent value is exported, by its time, and one without a time never is: a series as before its first value.
    """
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        metric.labels(**values)._value.set(0.0, timestamp=None)
    else:
        metric.remove(*(values[name] for name in metric._labelnames))


def _make_metric(figure: Figure, labels: tuple[str, ...]) -> Any:
    from prometheus_client import Counter, Gauge

    name, labels = PREFIX + figure.name, (*labels, *figure.labels)
    if figure.kind == "counter":
        return Counter(name, figure.text, labels)
    return Gauge(name, figure.text, labels, multiprocess_mode="mostrecent")
