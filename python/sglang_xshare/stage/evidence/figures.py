"""Every figure on /metrics: one table, and the exporter that makes prometheus metrics of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

from .agreement import Compared
from .balance import RankLoad
from .metrics import Interval
from .observe import Observed

PREFIX = "sglang:expert_policy_"


class Kind(Enum):
    """A counter adds up what is exported; a gauge is what was exported last."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True)
class InForce:
    """The plan in force as JSON-able, and the one that was when it was last exported; None where there is none."""

    plan: Mapping[str, Any] | None
    former: Mapping[str, Any] | None


@dataclass(frozen=True)
class Figure:
    """`value` gets it from a `part`, which is what was read since the last export: a number, None where there is none;
    with `labels` of its own, beside those of every figure of SGLang's, a number for each of their values.
    """

    part: type
    kind: Kind
    name: str
    text: str
    value: Callable[[Any], float | Mapping[tuple[str, ...], float | None] | None]
    labels: tuple[str, ...] = ()


def _show(part: InForce) -> dict[tuple[str, ...], float]:
    changes = [(part.former, 0), (part.plan, 1)] if part.plan != part.former else []
    return {(plan["policy"], json.dumps(plan)): value for plan, value in changes if plan is not None}


def _mean(value: Callable[[Any], float]) -> Callable[[Any], float | None]:
    """Of an interval with steps; one without has no mean, and the former stays."""
    return lambda interval: value(interval) if interval.layer_steps else None


def _rank_mean(name: str) -> Callable[[Any], float | None]:
    return _mean(lambda load: getattr(load, name) / load.layer_steps)


def _by_plan(value: Callable[[Any], float | None]) -> Callable[[Any], dict[tuple[str, ...], float | None]]:
    return lambda observed: {(plan,): value(interval) for plan, interval in observed.plans.items()}


SUM, SUM_OF_ROWS = "summed over layers and steps", "summed over rows, layers and steps"
LAST, STEP_MEAN = "last interval", "mean of a layer and step, last interval"
VANILLA = "Experts that vanilla routing would have woken"
ACTIVE = "Experts that are active"
FULLEST, MEAN = "on the expert-parallel rank that has most", "on the mean of expert-parallel ranks"
OBSERVED, OBSERVED_MASS = "Experts that a plan would have kept active", "Mass that a plan would have kept"

C, G = Kind.COUNTER, Kind.GAUGE
FIGURES = (
    Figure(Interval, C, "layer_steps", "MoE layer calls under an expert policy", attrgetter("layer_steps")),
    Figure(Interval, C, "experts_before", f"{VANILLA}, {SUM}", attrgetter("experts_before")),
    Figure(Interval, C, "experts_after", f"Active experts, {SUM}", attrgetter("experts_after")),
    Figure(Interval, C, "kept_mass", f"Kept mass, {SUM_OF_ROWS}", attrgetter("kept_mass")),
    Figure(Interval, C, "rows", f"Live router rows, {SUM}", attrgetter("rows")),
    Figure(Interval, C, "rescued_rows", "Rows given back their top-1 expert by rescue", attrgetter("rescued")),
    Figure(
        Interval,
        C,
        "steps",
        "Forwards of the target model, by outcome",
        lambda interval: {(outcome,): count for outcome, count in interval.outcomes.items()},
        ("outcome",),
    ),
    # Prometheus has an Info of its own, but not in multiprocess mode.
    Figure(
        InForce,
        G,
        "info",
        "1 of the plan in force, a label, as JSON with every default resolved; 0 of former ones",
        _show,
        ("policy", "plan"),
    ),
    Figure(
        Interval,
        G,
        "active_experts_before",
        f"Mean experts a layer and step that vanilla routing would have woken, {LAST}",
        _mean(attrgetter("mean_before")),
    ),
    Figure(
        Interval,
        G,
        "active_experts_after",
        f"Mean active experts a layer and step, {LAST}",
        _mean(attrgetter("mean_after")),
    ),
    Figure(Interval, G, "mean_kept_mass", f"Mean kept mass of a row, {LAST}", _mean(attrgetter("mean_kept_mass"))),
    Figure(RankLoad, C, "fullest_rank_experts_before", f"{VANILLA} {FULLEST}, {SUM}", attrgetter("largest_before")),
    Figure(
        RankLoad,
        G,
        "fullest_rank_active_experts_before",
        f"{VANILLA} {FULLEST}, {STEP_MEAN}",
        _rank_mean("largest_before"),
    ),
    Figure(RankLoad, C, "fullest_rank_experts_after", f"{ACTIVE} {FULLEST}, {SUM}", attrgetter("largest_after")),
    Figure(
        RankLoad,
        G,
        "fullest_rank_active_experts_after",
        f"{ACTIVE} {FULLEST}, {STEP_MEAN}",
        _rank_mean("largest_after"),
    ),
    Figure(RankLoad, C, "mean_rank_experts_before", f"{VANILLA} {MEAN}, {SUM}", attrgetter("mean_before")),
    Figure(RankLoad, G, "mean_rank_active_experts_before", f"{VANILLA} {MEAN}, {STEP_MEAN}", _rank_mean("mean_before")),
    Figure(RankLoad, C, "mean_rank_experts_after", f"{ACTIVE} {MEAN}, {SUM}", attrgetter("mean_after")),
    Figure(RankLoad, G, "mean_rank_active_experts_after", f"{ACTIVE} {MEAN}, {STEP_MEAN}", _rank_mean("mean_after")),
    Figure(
        Observed,
        C,
        "batch_sizes",
        "Observed steps, by live router rows",
        lambda observed: {(rows,): steps for rows, steps in observed.sizes.items()},
        ("rows",),
    ),
    Figure(Observed, C, "observed_experts", f"{OBSERVED}, {SUM}", _by_plan(attrgetter("experts_after")), ("plan",)),
    Figure(
        Observed, C, "observed_mass", f"{OBSERVED_MASS}, {SUM_OF_ROWS}", _by_plan(attrgetter("kept_mass")), ("plan",)
    ),
    Figure(
        Observed,
        G,
        "observed_active_experts",
        f"{OBSERVED}, {STEP_MEAN}",
        _by_plan(_mean(attrgetter("mean_after"))),
        ("plan",),
    ),
    Figure(
        Observed,
        G,
        "observed_kept_mass",
        f"{OBSERVED_MASS}, mean of a row, {LAST}",
        _by_plan(_mean(attrgetter("mean_kept_mass"))),
        ("plan",),
    ),
    Figure(
        Compared,
        C,
        "rank_comparisons",
        "Times that ranks have compared which experts they selected",
        attrgetter("comparisons"),
    ),
    Figure(
        Compared,
        C,
        "rank_disagreements",
        "Times that a rank had selected other experts than the first one",
        lambda compared: sum(compared.disagreements),
    ),
)
"""In the order in which a part's are made."""


class Exporter:
    """Keeps the prometheus metrics of every part, made when the first of its kind is exported: prometheus must be in
    multiprocess mode by then.
    """

    def __init__(self) -> None:
        self._metrics: dict[type, list[tuple[Figure, Any]]] = {}

    def export(self, part: Any, labels: dict[str, Any]) -> None:
        """Add what `part` says to its counters, and set its gauges. `labels` are upstream's."""
        if type(part) not in self._metrics:
            figures = [figure for figure in FIGURES if figure.part is type(part)]
            self._metrics[type(part)] = [(figure, _make_metric(figure, tuple(labels))) for figure in figures]
        for figure, metric in self._metrics[type(part)]:
            found = figure.value(part)
            for values, number in found.items() if isinstance(found, Mapping) else [((), found)]:
                if number is not None:
                    own = metric.labels(**labels, **dict(zip(figure.labels, values, strict=True)))
                    own.inc(number) if figure.kind is Kind.COUNTER else own.set(number)


def _make_metric(figure: Figure, labels: tuple[str, ...]) -> Any:
    from prometheus_client import Counter, Gauge

    name, labels = PREFIX + figure.name, (*labels, *figure.labels)
    if figure.kind is Kind.COUNTER:
        return Counter(name, figure.text, labels)
    return Gauge(name, figure.text, labels, multiprocess_mode="mostrecent")
