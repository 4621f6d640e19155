"""Medians, quartiles and ratios of a comparison. The first series is the baseline of every ratio."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import correlation, linear_regression, median, quantiles

from benchmark.common.rounds import Series

LEAST = 5


@dataclass(frozen=True)
class Spread:
    """Lower quartile, median and upper quartile (linear between the rounds)."""

    lower: float
    median: float
    upper: float


@dataclass(frozen=True)
class Summary:
    """One row of the table.

    Output tokens a second, and the ratio of these to the baseline's within each round; bench_serving's median time per
    output token and to the first one, in milliseconds. Mean experts a layer and step, without and with selection, mean
    share of gating mass kept, and forwards under policy, of all rounds. Mean tokens a verification step accepts.
    """

    name: str
    throughput: Spread
    tpot_ms: Spread
    ttft_ms: Spread
    paired_ratio: Spread
    experts_before: float | None
    experts_after: float | None
    kept_mass: float | None
    policy_steps: int
    accept_length: float | None


@dataclass(frozen=True)
class Line:
    """A least-squares line y = intercept + slope * x, and the share of variance it explains."""

    slope: float
    intercept: float
    r_squared: float


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles; of a single value, that value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return Spread(lower, median(values), upper)


def summarize(series: Sequence[Series]) -> list[Summary]:
    """One row a series."""
    baseline = _values(series[0], "output_throughput")
    return [_summarize(one, baseline) for one in series]


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line | None:
    """The line through the points; None below `LEAST` distinct x: fewer lie near some line whatever they are."""
    if len(set(x)) < LEAST:
        return None
    slope, intercept = linear_regression(x, y)
    return Line(slope, intercept, correlation(x, y) ** 2 if len(set(y)) > 1 else 1.0)


def _summarize(series: Series, baseline: list[float]) -> Summary:
    throughput = _values(series, "output_throughput")
    accepted = [value for value in _values(series, "accept_length") if value is not None]
    return Summary(
        name=series.variant.name,
        throughput=spread(throughput),
        tpot_ms=spread(_values(series, "median_tpot_ms")),
        ttft_ms=spread(_values(series, "median_ttft_ms")),
        paired_ratio=spread([on / off for on, off in zip(throughput, baseline, strict=True)]),
        experts_before=_mean([evidence.experts_before for evidence in series.evidence]),
        experts_after=_mean([evidence.experts_after for evidence in series.evidence]),
        kept_mass=_mean([evidence.kept_mass for evidence in series.evidence]),
        policy_steps=sum(evidence.policy_steps for evidence in series.evidence),
        accept_length=median(accepted) if accepted else None,
    )


def _values(series: Series, key: str) -> list[float]:
    return [result[key] for result in series.results]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
