"""Plot what --expert-policy-trace recorded: `python examples/plot_trace.py TRACE PLOT.png`.

The experts that a layer loads in a step, against the rows of the step: what the model's own routing would have loaded,
and what was. Each step is a point, the mean of its layers.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLUMNS = {"experts_before": "the model's own routing", "experts_after": "under the policy"}


def read_steps(trace: Path) -> list[dict[str, float]]:
    """A record a step: its rows, and the means of its layers. Raises ValueError for a trace without a step."""
    layers = defaultdict(list)
    for line in trace.read_text().splitlines():
        record = json.loads(line)
        layers[record["step"]].append(record)
    if not layers:
        raise ValueError(f"{trace}: no step was recorded; needed is a batch of two rows or more under the policy")
    names = ("batch_size", *COLUMNS)
    return [{name: sum(one[name] for one in step) / len(step) for name in names} for step in layers.values()]


def plot(steps: list[dict[str, float]], out: Path) -> None:
    """Write the plot, in the format that the file's name says."""
    figure, axes = plt.subplots(layout="constrained")
    for name, label in COLUMNS.items():
        axes.scatter([step["batch_size"] for step in steps], [step[name] for step in steps], s=12, label=label)
    axes.set(xlabel="rows of the step", ylabel="active experts a layer", title="Experts that a decode step loads")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=len(COLUMNS))
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/plot_trace.py TRACE PLOT.png")
    try:
        plot(read_steps(Path(sys.argv[1])), Path(sys.argv[2]))
    except (OSError, ValueError) as error:
        sys.exit(f"plot_trace: {error}")
