"""A comparison on paper: the table, the JSON record with every raw round, and the plot."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from benchmark.serving.machine import describe_machine
from benchmark.serving.rounds import Series, Workload
from benchmark.serving.summary import Fit, Spread, Summary, active_experts, fit_line

TABLE_WIDTH = 120  # of output that is no terminal, or a narrow one: a wrapped line reads better than wrapped cells

# A column of the table beyond the standard ones: its title, and a cell for each series.
ExtraColumns = Mapping[str, Sequence[str]]


def print_table(title: str, summaries: Sequence[Summary], extra: ExtraColumns | None = None) -> None:
    """Print one row a series: median [quartiles] of the speeds, means of the evidence."""
    table = Table(title=title, title_justify="left")
    table.add_column("policy", overflow="fold")
    headings = ["output tokens/s", "TPOT ms", "experts before", "after", "kept mass", "ratio", "paired ratio"]
    headings += ["accepted"] if any(row.accept_length for row in summaries) else []
    for heading in [*headings, *(extra or {})]:
        table.add_column(heading, justify="right")
    for index, row in enumerate(summaries):
        cells = [
            _spread_text(row.throughput, 1),
            _spread_text(row.tpot_ms, 1),
            _text(row.experts_before, 1),
            _text(row.experts_after, 1),
            _text(row.kept_mass, 3),
            _text(row.ratio, 2),
            _spread_text(row.paired_ratio, 2),
        ]
        cells += [_text(row.accept_length, 2)] if "accepted" in headings else []
        table.add_row(row.name, *cells, *(column[index] for column in (extra or {}).values()))
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(table)


def write_record(
    path: Path,
    command: Sequence[str],
    workload: Workload,
    series: Sequence[Series],
    summaries: Sequence[Summary],
    **more: Any,
) -> None:
    """Write everything known of the comparison to `path` as JSON."""
    record = {
        **describe_machine(),
        "command": list(command),
        "workload": asdict(workload),
        "summary": [asdict(row) for row in summaries],
        "fit": _fits(summaries),
        "series": [one.record() for one in series],
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, default=str) + "\n")


def write_plot(path: Path, title: str, summaries: Sequence[Summary]) -> None:
    """Plot throughput and time per output token against active experts, with quartile bars and the linear fit."""
    points = active_experts(summaries)
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axis, name, label in zip(axes, ("throughput", "tpot_ms"), ("output tokens/s", "TPOT, ms"), strict=True):
        for row, experts in points:
            value: Spread = getattr(row, name)
            error = [[value.median - value.lower], [value.upper - value.median]]
            axis.errorbar(experts, value.median, yerr=error, fmt="o", capsize=3, label=row.name)
        fit = _fit(points, name)
        if fit is not None:
            ends = [min(x for _, x in points), max(x for _, x in points)]
            line = f"{fit.intercept:.4g} {fit.slope:+.4g} x,  R² = {fit.r_squared:.3f}"
            axis.plot(ends, [fit.intercept + fit.slope * x for x in ends], "--", color="grey", label=line)
        axis.set(xlabel="active experts a layer and step", ylabel=label)
        axis.set_ylim(bottom=0)
        if points:
            axis.legend(fontsize=8)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _fit(points: Sequence[tuple[Summary, float]], name: str) -> Fit | None:
    return fit_line([x for _, x in points], [getattr(row, name).median for row, _ in points])


def _fits(summaries: Sequence[Summary]) -> dict[str, dict[str, float] | None]:
    """The lines of the plot: throughput, and time per output token, over active experts."""
    fits = {name: _fit(active_experts(summaries), name) for name in ("throughput", "tpot_ms")}
    return {name: None if fit is None else asdict(fit) for name, fit in fits.items()}


def _text(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _spread_text(value: Spread, digits: int) -> str:
    return f"{value.median:.{digits}f} [{value.lower:.{digits}f}, {value.upper:.{digits}f}]"
