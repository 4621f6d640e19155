"""Fits of the cost model to what was measured, and by how much each misses a time that it was not fitted to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from benchmark.common.comparison import Comparison
from benchmark.common.table import Table
from benchmark.common.widened import read_widened
from benchmark.cost.published import list_exchanges
from benchmark.serving.report import KEY
from sglang_xshare.estimate.machine import Machine, Work, fit, leave_one_out

NOTE = """\
Missed: by how much a time is off when the model is fitted to all others, median and largest share of it, whichever way.
Constants: a layer's own time; bandwidth at which weights are read; operations a second; an exchange between ranks and
bandwidth of what a rank sends, within a node | between nodes; - where nothing depends on it, or least squares leave it
out. Layers: benchmark.cost.model, by experts awake, rows, ranks and where experts are. Served: decode steps of the
widened model by policy, medians. DeepEP: its published table of low-latency kernels on H800."""


@dataclass(frozen=True)
class Fitted:
    """A model fitted to `works` that took `seconds`."""

    works: Sequence[Work]
    seconds: Sequence[float]

    @cached_property
    def machine(self) -> Machine:
        """The constants."""
        return fit(self.works, self.seconds)

    @cached_property
    def misses(self) -> list[float]:
        """By how much each time is missed by the others' fit, as a share of it."""
        return leave_one_out(self.works, self.seconds)

    def to_cells(self) -> list[str]:
        """Of the table."""
        machine, sizes = self.machine, [abs(miss) for miss in self.misses]
        rates = [1 / value if value else None for value in (machine.read, machine.flops)]
        links = ((machine.near, machine.near_bytes), (machine.far, machine.far_bytes))
        return [
            str(len(self.seconds)),
            f"{median(sizes):.0%}",
            f"{max(sizes):.0%}",
            _format(machine.layers, 1e6, "us"),
            _format(rates[0], 1e-9, "GB/s"),
            _format(rates[1], 1e-9, "G/s"),
            " | ".join(_format(latency, 1e6, "us") for latency, _ in links),
            " | ".join(_format(1 / size if size else None, 1e-9, "GB/s") for _, size in links),
        ]


def fit_layers(points: Mapping[str, Any]) -> Fitted:
    """To a record of `benchmark.cost.model`."""
    layouts = [layout for point in points.values() for layout in point["layouts"].values()]
    return Fitted([Work(**layout["work"]) for layout in layouts], [layout["seconds"] for layout in layouts])


def fit_served(points: Mapping[str, Any]) -> Fitted:
    """To the decode steps of a record of `benchmark.serving`, of the widened model: its weights read, by policy."""
    comparison, weights = Comparison.read(points[KEY]), read_widened()
    works, seconds = [], []
    for number, row in enumerate(comparison.summaries):
        active = comparison.active[number]
        if active is not None and not comparison.series[number].variant.args:
            read = weights.dense + weights.moe_layers * active * weights.expert
            works.append(Work(layers=weights.moe_layers, read=read))
            seconds.append(row.tpot_ms.median / 1e3)
    return Fitted(works, seconds)


def tabulate_layers(points: Mapping[str, Any]) -> Table:
    """The fit to one record of layers."""
    return _tabulate({"layers": fit_layers(points)})


def tabulate_fits(layers: Mapping[str, Any], serving: Mapping[str, Any]) -> Table:
    """A row a fit: layers on ranks, served steps, and published exchanges."""
    return _tabulate(
        {
            "layers on ranks, CPU": fit_layers(layers),
            "served decode steps, CPU": fit_served(serving),
            "DeepEP's exchanges, H800": Fitted(*list_exchanges()),
        }
    )


def _tabulate(fits: Mapping[str, Fitted]) -> Table:
    headings = ["fit", "times", "missed", "at most", "a layer", "reads", "computes", "exchange", "sends"]
    return Table("The cost model, fitted", headings, [[name, *one.to_cells()] for name, one in fits.items()], NOTE)


def _format(value: float | None, scale: float, unit: str) -> str:
    return f"{value * scale:.3g} {unit}" if value else "-"
