"""A comparison of several variants on one workload.

The variants are measured in turns, round by round. Each variant is compared with the first one, the baseline.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import correlation, linear_regression
from typing import Any

from benchmark.common.interval import LEAST, Spread, spread
from benchmark.common.record import Record
from benchmark.common.rounds import Series, Workload, run_rounds
from benchmark.common.server import Server
from benchmark.common.variant import BASELINE, Variant


@dataclass(frozen=True)
class Summary:
    """One row of the table: the results of one variant over all rounds.

    - `throughput`: output tokens per second.
    - `tpot_ms` and `ttft_ms`: the median time per output token and to the first token, in milliseconds.
    - `ratios`: for each round, the throughput divided by the baseline's throughput.
    - `experts_before` and `experts_after`: the mean number of active experts per layer and step, without and with the
      policy.
    - `kept_mass`: the mean share of the gating mass that the policy keeps.
    - `policy_steps`: the number of forwards that used the policy.
    - `accept_length`: the tokens per verify step, including the target model's own token.
    """

    name: str
    throughput: Spread
    tpot_ms: Spread
    ttft_ms: Spread
    ratios: list[float]
    experts_before: float | None
    experts_after: float | None
    kept_mass: float | None
    policy_steps: int
    accept_length: float | None

    @property
    def paired_ratio(self) -> Spread:
        """Return the mean of the ratios, with its confidence interval."""
        return spread(self.ratios)


@dataclass(frozen=True)
class Line:
    """A least-squares line, y = intercept + slope * x. The line explains the share `r_squared` of the variance."""

    slope: float
    intercept: float
    r_squared: float


def summarize(series: Sequence[Series]) -> list[Summary]:
    """Return one table row for each series."""
    baseline = _values(series[0], "output_throughput")
    return [_summarize(one, baseline) for one in series]


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line | None:
    """Fit a least-squares line to the points.

    Return None for fewer than `LEAST` distinct x values, because few points can lie near a line by chance.
    """
    if len(set(x)) < LEAST:
        return None
    slope, intercept = linear_regression(x, y)
    return Line(slope, intercept, correlation(x, y) ** 2 if len(set(y)) > 1 else 1.0)


def _summarize(series: Series, baseline: list[float]) -> Summary:
    throughput = _values(series, "output_throughput")
    return Summary(
        name=series.variant.name,
        throughput=spread(throughput),
        tpot_ms=spread(_values(series, "median_tpot_ms")),
        ttft_ms=spread(_values(series, "median_ttft_ms")),
        ratios=[on / off for on, off in zip(throughput, baseline, strict=True)],
        experts_before=_mean([evidence.experts_before for evidence in series.evidence]),
        experts_after=_mean([evidence.experts_after for evidence in series.evidence]),
        kept_mass=_mean([evidence.kept_mass for evidence in series.evidence]),
        policy_steps=sum(evidence.policy_steps for evidence in series.evidence),
        accept_length=_mean(_values(series, "accept_length")),
    )


def _values(series: Series, key: str) -> list[float]:
    return [result[key] for result in series.results]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


NO_STEP = "Selected in no step, so the row shows no effect of the policy"
ONE_ROUND = "One round has no interval: its differences prove nothing."


@dataclass(frozen=True)
class Comparison:
    """The results of several variants on one workload. The first variant is the baseline."""

    workload: Workload
    series: Sequence[Series]

    @classmethod
    def read(cls, point: Mapping[str, Any]) -> "Comparison":
        """Create a comparison from a point that `measure` added to a record."""
        return cls(Workload.read(point["workload"]), [Series.read(one) for one in point["series"]])

    @property
    def rounds(self) -> int:
        """Return the number of rounds that every variant has completed."""
        return min(len(one.results) for one in self.series)

    @cached_property
    def summaries(self) -> list[Summary]:
        """Return one table row for each series."""
        return summarize(self.series)

    @property
    def order(self) -> list[int]:
        """Return the indices of the series in table order: the baseline, then the highest ratio first."""
        ratios = [row.paired_ratio.mean for row in self.summaries]
        return [0, *sorted(range(1, len(ratios)), key=lambda number: -ratios[number])]

    @property
    def idle(self) -> list[str]:
        """Return the names of the policies that were never used, for example because all batches were too small."""
        return [
            row.name
            for one, row in zip(self.series, self.summaries, strict=True)
            if one.variant.policy not in (None, BASELINE) and row.policy_steps == 0
        ]

    @cached_property
    def active(self) -> list[float | None]:
        """Return the mean number of active experts of each series, or None if no server has counted them.

        A server with a policy counts its active experts. It also counts the experts that the model's own routing would
        activate. A server without a policy counts nothing. Its number is the mean of the second count of all servers
        with the same flags.
        """
        return [
            self._upstream_active(one.variant.args) if row.experts_after is None else row.experts_after
            for one, row in zip(self.series, self.summaries, strict=True)
        ]

    def _upstream_active(self, args: tuple[str, ...]) -> float | None:
        counted = [
            row.experts_before
            for one, row in zip(self.series, self.summaries, strict=True)
            if one.variant.args == args and row.experts_before is not None
        ]
        return sum(counted) / len(counted) if counted else None


def is_measured(record: Record, key: str) -> bool:
    """Return whether the record contains all rounds of the point `key`."""
    if key not in record:
        return False
    comparison = Comparison.read(record.points[key])
    return comparison.rounds == comparison.workload.rounds


def measure(
    record: Record, key: str, workload: Workload, variants: Sequence[Variant], servers: Sequence[Server]
) -> Comparison:
    """Measure all missing rounds and return the comparison."""
    for _ in measure_each(record, key, workload, variants, servers):
        pass
    return Comparison.read(record.points[key])


def measure_each(
    record: Record, key: str, workload: Workload, variants: Sequence[Variant], servers: Sequence[Server]
) -> Iterator[int]:
    """Measure the missing rounds of the point `key`. Yield the number of each round after the round is recorded."""
    series = [Series(variant) for variant in variants]
    if key in record:
        series = list(Comparison.read(record.points[key]).series)
    for number in run_rounds(workload, series, servers):
        record.add(key, workload=asdict(workload), series=[asdict(one) for one in series])
        yield number


def format_experts(row: Summary) -> str:
    """Format the active experts as "before -> after", or as "-" if the server did not count them."""
    if row.experts_after is None:
        return "-"
    return f"{format_number(row.experts_before, 1)} -> {format_number(row.experts_after, 1)}"


def format_number(value: float | None, digits: int) -> str:
    """Format a number with `digits` decimals, or None as "-"."""
    return "-" if value is None else f"{value:.{digits}f}"
