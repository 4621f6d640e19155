"""Variants on one workload, served side by side: measured round by round into a record, and the table of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from benchmark.common.record import Record
from benchmark.common.rounds import Series, Workload, run_rounds
from benchmark.common.server import Server
from benchmark.common.summary import Spread, Summary, summarize
from benchmark.common.table import Table
from benchmark.common.variant import BASELINE, Variant

NOTE = """\
Medians over the rounds [lower, upper quartile]. Active experts and kept mass: means over layers and steps under policy,
counted by the server; before the arrow those of upstream's own routing. Ratio: of output tokens/s to the
first row's, within each round, so that the machine's drift from round to round stays out of it; the other rows are in
its order, which need not be that of the medians of tokens/s."""
NO_STEP = "Selected in no step, so that the row shows nothing of the policy"
ONE_ROUND = "One round shows no spread: its differences prove nothing."
HEADINGS = ("model, policy", "output tokens/s", "TPOT ms", "active experts", "kept mass", "ratio")


@dataclass(frozen=True)
class Comparison:
    """Some variants on one workload; the first is the baseline. `columns`: further cells by heading, one a series."""

    workload: Workload
    series: Sequence[Series]
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, point: Mapping[str, Any], columns: Mapping[str, Sequence[str]] | None = None) -> "Comparison":
        """One out of a record, where `measure` left it."""
        return cls(Workload.read(point["workload"]), [Series.read(one) for one in point["series"]], columns or {})

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


def tabulate(title: str, comparisons: Sequence[Comparison], note: str = "") -> Table:
    """A row a series, below one of its model; `note` follows what is said of the columns."""
    extra = list(dict.fromkeys(heading for one in comparisons for heading in one.columns))
    drafts = ["accepted"] if any(row.accept_length for one in comparisons for row in one.summaries) else []
    rows = []
    for one in comparisons:
        rows.append([one.workload.model.name, *[""] * (len(HEADINGS) + len(drafts) + len(extra) - 1)])
        for number in one.order:
            row = one.summaries[number]
            accepted = [format_number(row.accept_length, 2)] * len(drafts)
            cells = [one.columns[heading][number] if heading in one.columns else "-" for heading in extra]
            rows.append([row.name, *_cells(row), *accepted, *cells])
    workloads = dict.fromkeys(f"Of each row: {one.workload}." for one in comparisons)
    idle = dict.fromkeys(name for one in comparisons for name in one.idle)
    nothing = f"{NO_STEP}: {', '.join(idle)}." if idle else ""
    doubt = ONE_ROUND if any(one.rounds == 1 for one in comparisons) else ""
    said = " ".join(filter(None, (*workloads, NOTE, note, nothing, doubt)))
    return Table(title, [*HEADINGS, *drafts, *extra], rows, said)


def _cells(row: Summary) -> list[str]:
    return [
        format_spread(row.throughput, 1),
        format_number(row.tpot_ms.median, 1),
        format_experts(row),
        format_number(row.kept_mass, 3),
        format_spread(row.paired_ratio, 2),
    ]


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
