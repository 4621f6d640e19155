"""Variants on one workload, served side by side, measured round by round into a record; and cells of its tables."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from benchmark.common.record import Record
from benchmark.common.rounds import Series, Workload, run_rounds
from benchmark.common.server import Server
from benchmark.common.summary import Spread, Summary, summarize
from benchmark.common.variant import BASELINE, Variant

NO_STEP = "Selected in no step, so that the row shows nothing of the policy"
ONE_ROUND = "One round shows no spread: its differences prove nothing."


@dataclass(frozen=True)
class Comparison:
    """Some variants on one workload; the first is the baseline."""

    workload: Workload
    series: Sequence[Series]

    @classmethod
    def read(cls, point: Mapping[str, Any]) -> "Comparison":
        """One out of a record, where `measure` left it."""
        return cls(Workload.read(point["workload"]), [Series.read(one) for one in point["series"]])

    @property
    def rounds(self) -> int:
        """Rounds measured so far."""
        return min(len(one.results) for one in self.series)

    @cached_property
    def summaries(self) -> list[Summary]:
        """One row a series."""
        return summarize(self.series)

    @property
    def order(self) -> list[int]:
        """The series by number: the baseline, then by ratio, the highest first."""
        ratios = [row.paired_ratio.median for row in self.summaries]
        return [0, *sorted(range(1, len(ratios)), key=lambda number: -ratios[number])]

    @property
    def idle(self) -> list[str]:
        """The policies that selected in no step: every batch was too small, or of another phase."""
        return [
            row.name
            for one, row in zip(self.series, self.summaries, strict=True)
            if one.variant.policy not in (None, BASELINE) and row.policy_steps == 0
        ]

    @cached_property
    def active(self) -> list[float | None]:
        """The active experts of each series, None where nobody can tell.

        A server with a policy has counted them. For one without, servers of the same flags have counted what upstream's
        routing would have on the same prompts: their mean.
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
    """Whether `measure` has left all rounds under `key`."""
    if key not in record:
        return False
    comparison = Comparison.read(record.points[key])
    return comparison.rounds == comparison.workload.rounds


def measure(
    record: Record, key: str, workload: Workload, variants: Sequence[Variant], servers: Sequence[Server]
) -> Comparison:
    """Alternating rounds, as many as the record lacks, kept under `key` after each. Returns what it then has."""
    series = [Series(variant) for variant in variants]
    if key in record:
        series = list(Comparison.read(record.points[key]).series)
    for _ in run_rounds(workload, series, servers):
        record.add(key, workload=asdict(workload), series=[asdict(one) for one in series])
    return Comparison.read(record.points[key])


def format_experts(row: Summary) -> str:
    """Active experts before -> after, where the server counted them."""
    if row.experts_after is None:
        return "-"
    return f"{format_number(row.experts_before, 1)} -> {format_number(row.experts_after, 1)}"


def format_number(value: float | None, digits: int) -> str:
    """The number, or "-"."""
    return "-" if value is None else f"{value:.{digits}f}"


def format_spread(value: Spread, digits: int) -> str:
    """Median and quartiles."""
    return f"{value.median:.{digits}f} [{value.lower:.{digits}f}, {value.upper:.{digits}f}]"
