"""The pictures in docs/pictures. Each picture is drawn from one record, and its file contains a digest of the data."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmark.common.comparison import Comparison
from benchmark.common.interval import spread
from benchmark.common.paths import ROOT
from benchmark.common.plot import Line, Panel, Picture, draw, find_digest, read_digest
from benchmark.common.record import read_record
from benchmark.depth.report import plot_depths
from benchmark.quality.report import plot_quality
from benchmark.records.experiments import EXPERIMENTS
from benchmark.records.tables import H200_RUN

FOLDER = ROOT / "docs" / "pictures"
SHOWN = ("vanilla", "xshare:k0=1,add", "xshare:k0=1,mass", "oea:k0", "moe-spec:budget", "lynx-lat:retain", "pruned:k0")
"""The lines in the picture of the loss.

They are the policies with more than two settings, and `mass`, on which the default of `xshare` is based.
"""
TODAY = {"xshare": "xshare:mass=0.9"}
"""The current spelling of the policies in `H200_RUN`. This run is older than the current defaults."""


def plot_gains(points: Mapping[str, Any]) -> Picture:
    """Return a picture of the throughput gain against the number of concurrent requests.

    Each model and policy has one line. Points with a single round are omitted, and also points at which the policy was
    never used.
    """
    lines: dict[str, list[tuple[int, float, float, float]]] = {}
    for key, point in points.items():
        if "/concurrency=" in key:
            comparison = Comparison.read(point)
            off, on = ([one["output_throughput"] for one in series.results] for series in comparison.series)
            if len(on) > 1 and comparison.summaries[1].experts_after is not None:
                gain = spread([100 * (after / before - 1) for after, before in zip(on, off, strict=True)])
                policy, size = comparison.series[1].variant.name, comparison.workload.concurrency
                name = f"{comparison.workload.model.name}, {TODAY.get(policy, policy)}"
                lines.setdefault(f"{name} ({len(on)} rounds)", []).append((size, gain.mean, gain.lower, gain.upper))
    drawn = []
    for name, found in lines.items():
        sizes, means, lowers, uppers = zip(*sorted(found), strict=True)
        drawn.append(Line(name, sizes, means, list(zip(lowers, uppers, strict=True))))
    panel = Panel("requests at a time", "gain in output tokens/s, %", drawn, "one H200", log_x=True, zero=0.0)
    note = "random weights; means of the rounds' ratios; error bars: 95 % t-intervals"
    return Picture((panel,), note)


def plot_losses(points: Mapping[str, Any]) -> Picture:
    """Return a picture of loss against active experts for the policies in `SHOWN`."""
    return plot_quality({name: point for name, point in points.items() if (name.rpartition("=")[0] or name) in SHOWN})


PICTURES: dict[str, tuple[Path, Callable[[Mapping[str, Any]], Picture]]] = {
    "gain-h200": (Path(H200_RUN, "server.json"), plot_gains),
    "tokens-by-depth": (EXPERIMENTS["depth"].path(Path()), plot_depths),
    "loss-by-experts": (EXPERIMENTS["quality"].path(Path()), plot_losses),
}
"""The pictures by name. Each entry contains the path of the record and the function that makes the picture."""


def check_pictures(results: Path, folder: Path = FOLDER) -> list[str]:
    """Return one line for each picture whose digest differs from the digest of its record."""
    return [
        f"{path}: not drawn from its record; python -m benchmark.records --tables draws it"
        for path, picture in _make(results, folder)
        if read_digest(path) != find_digest(picture)
    ]


def write_pictures(results: Path, folder: Path = FOLDER) -> list[str]:
    """Draw all pictures whose digest differs from the digest of the record.

    Return one line for each picture that could not be drawn.
    """
    for path, picture in _make(results, folder):
        if read_digest(path) != find_digest(picture):
            draw(picture, path)
    return check_pictures(results, folder)


def _make(results: Path, folder: Path) -> list[tuple[Path, Picture]]:
    return [
        (folder / f"{name}.svg", plot(read_record(results / record)["points"]))
        for name, (record, plot) in PICTURES.items()
    ]
