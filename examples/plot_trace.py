"""Plot of a trace of --expert-policy-trace: `python examples/plot_trace.py TRACE PLOT.png`.

The plot shows a layer's active experts in a step against the rows of the step, with the model's own routing and with
the policy. Each layer of a step is a point; layers of steps with equal rows lie side by side, the first at the left.
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

COLUMNS = {"experts_before": "the model's own routing", "experts_after": "under the policy"}
WIDTH = 0.7  # of the strip in which the layers lie, in rows


def read_trace(trace: Path) -> list[dict[str, int]]:
    """Return a record for each layer and step. Raises ValueError for a trace without a step."""
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    if not records:
        raise ValueError(f"{trace}: must contain a step: run a batch of at least two rows under the policy")
    return records


def plot(records: list[dict[str, int]], out: Path) -> None:
    """Write the plot; the file's suffix names the format."""
    layers = sorted({record["layer"] for record in records})
    aside = {layer: WIDTH * ((place + 0.5) / len(layers) - 0.5) for place, layer in enumerate(layers)}
    rows = [record["batch_size"] for record in records]
    places = [record["batch_size"] + aside[record["layer"]] for record in records]
    figure, axes = plt.subplots(layout="constrained")
    for name, label in COLUMNS.items():
        axes.scatter(places, [record[name] for record in records], s=12, alpha=0.6, label=label)
    across = f"rows of the step; side by side layers {layers[0]} to {layers[-1]}"
    axes.set(xlabel=across, ylabel="active experts", title="Experts that a layer loads in a decode step")
    axes.set_xlim(min(rows) - 1, max(rows) + 1)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside lower center", ncols=len(COLUMNS))
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/plot_trace.py TRACE PLOT.png")
    try:
        plot(read_trace(Path(sys.argv[1])), Path(sys.argv[2]))
    except (OSError, ValueError) as error:
        sys.exit(f"plot_trace: {error}")
