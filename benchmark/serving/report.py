"""Comparisons on paper: the table, the JSON record with every raw round, and the plot."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot
from matplotlib.axes import Axes
from rich import box
from rich.console import Console
from rich.table import Table

from benchmark.common.machine import describe_machine
from benchmark.common.rounds import Series, Workload
from benchmark.common.summary import Fit, Spread, Summary, active_experts, fit_line, summarize

matplotlib.use("Agg")
TABLE_WIDTH = 132  # of output that is no terminal, or a narrow one: a wrapped line reads better than wrapped cells
LEGEND = """\
Medians over the rounds [lower, upper quartile]. Active experts and kept mass: means over layers and steps under policy,
counted by the server; before the arrow what upstream's own routing would have woken. Ratio: of output tokens/s to the
first row's, within each round."""
PLOTTED = {"throughput": "output tokens/s", "tpot_ms": "TPOT, ms"}


@dataclass(frozen=True)
class Comparison:
    """Some variants on one workload. `quality`: further columns by heading, a value or None for each series."""

    workload: Workload
    series: Sequence[Series]
    quality: Mapping[str, Sequence[float | None]] = field(default_factory=dict)

    @cached_property
    def summaries(self) -> list[Summary]:
        """One row a series."""
        return summarize(self.series)

    @cached_property
    def points(self) -> list[tuple[Summary, float]]:
        """The rows whose active experts are known, with them."""
        return active_experts(self.summaries)

    def fit(self, name: str) -> Fit | None:
        """The line of `name`, one of `PLOTTED`, over active experts."""
        return fit_line([x for _, x in self.points], [getattr(row, name).median for row, _ in self.points])

    def record(self) -> dict[str, Any]:
        """Everything known of it, as JSON."""
        fits = {name: self.fit(name) for name in PLOTTED}
        return {
            "workload": asdict(self.workload),
            "summary": [asdict(row) for row in self.summaries],
            "quality": dict(self.quality),
            "fit": {name: None if fit is None else asdict(fit) for name, fit in fits.items()},
            "series": [one.record() for one in self.series],
        }


def describe_workload(workload: Workload) -> str:
    """The workload in a few words."""
    lengths = f"{workload.input_tokens} in / {workload.output_tokens} out"
    return f"concurrency {workload.concurrency}, {lengths}, {workload.rounds} alternating rounds"


def print_table(title: str, comparisons: Sequence[Comparison]) -> None:
    """Print a row a series; `LEGEND` says what the cells mean."""
    quality = list(dict.fromkeys(heading for one in comparisons for heading in one.quality))
    with_drafts = any(row.accept_length for one in comparisons for row in one.summaries)
    table = Table(title=title, title_justify="left", padding=(0, 1, 0, 0), box=box.SIMPLE_HEAD)
    table.add_column("model, policy", overflow="fold", min_width=24)
    headings = ["output tokens/s", "TPOT ms", "active experts", "kept mass", "ratio"]
    for heading in [*headings, *(["accepted"] if with_drafts else []), *quality]:
        table.add_column(heading, justify="right", no_wrap=True)
    for one in comparisons:
        table.add_row(one.workload.model.name)
        for index, row in enumerate(one.summaries):
            experts = f"{_text(row.experts_before, 1)} -> {_text(row.experts_after, 1)}" if row.experts_after else "-"
            cells = [_spread_text(row.throughput, 1), _text(row.tpot_ms.median, 1), experts, _text(row.kept_mass, 3)]
            cells += [_spread_text(row.paired_ratio, 2)]
            cells += [_text(row.accept_length, 2)] if with_drafts else []
            cells += [_text(one.quality[heading][index] if heading in one.quality else None, 3) for heading in quality]
            table.add_row(f"  {row.name}", *cells)
        table.add_section()
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)
    print(LEGEND)


def write_record(path: Path, command: Sequence[str], comparisons: Sequence[Comparison]) -> None:
    """Write where, with what and how it was measured, and every figure, to `path` as JSON."""
    record = {
        **describe_machine(),
        "command": list(command),
        "comparisons": [one.record() for one in comparisons],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, default=str, allow_nan=False) + "\n")


def write_plot(path: Path, title: str, comparisons: Sequence[Comparison]) -> None:
    """Plot throughput and time per output token over active experts, with quartile bars and the linear fit."""
    size = (11, 4.2 * len(comparisons))
    figure, axes = pyplot.subplots(len(comparisons), len(PLOTTED), figsize=size, layout="constrained", squeeze=False)
    for row, comparison in zip(axes, comparisons, strict=True):
        for axis, name in zip(row, PLOTTED, strict=True):
            _plot(axis, comparison, name)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot(axis: Axes, comparison: Comparison, name: str) -> None:
    for row, experts in comparison.points:
        value: Spread = getattr(row, name)
        error = [[value.median - value.lower], [value.upper - value.median]]
        axis.errorbar(experts, value.median, yerr=error, fmt="o", capsize=3, label=row.name)
    fit = comparison.fit(name)
    if fit is not None:
        ends = [f(x for _, x in comparison.points) for f in (min, max)]
        line = f"{fit.intercept:.4g} {fit.slope:+.4g} x,  R² = {fit.r_squared:.3f}"
        axis.plot(ends, [fit.intercept + fit.slope * x for x in ends], "--", color="grey", label=line)
    axis.set(xlabel="active experts a layer and step", ylabel=PLOTTED[name], title=comparison.workload.model.name)
    axis.set_ylim(bottom=0)
    if comparison.points:
        axis.legend(fontsize=8)


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _spread_text(value: Spread, digits: int) -> str:
    return f"{value.median:.{digits}f} [{value.lower:.{digits}f}, {value.upper:.{digits}f}]"
