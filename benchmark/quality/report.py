"""A comparison of policies on paper: the table, the JSON record and the plot."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from rich.console import Console
from rich.table import Table

from benchmark.common.machine import describe_machine
from benchmark.common.variant import parse_variant
from benchmark.quality.measure import Loss

BATCHES = {"one_domain": "batches of one domain", "mixed": "mixed batches"}


def print_tables(records: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print one row a policy, then the losses of each domain: millinats above vanilla's, ± the standard error."""
    headings = ["policy", "experts", "kept mass", "mnats", "mixed: experts", "mnats", "greedy same", "answers right"]
    print_table(title, headings, [_summary_row(record) for record in records])
    domains = [name for name in records[0]["one_domain"]["loss"] if name != "all"]
    by_domain = [[record["policy"], *(_loss(record, domain) for domain in domains)] for record in records]
    print_table("the same by domain, in batches of one domain, mnats", ["policy", *domains], by_domain)


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int = 1) -> None:
    """Print a table: the first columns are text, the others numbers."""
    table = Table(title=title, title_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < text_columns else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Into a file as wide as it takes.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _summary_row(record: Mapping[str, Any]) -> list[str]:
    one, mixed = record["one_domain"], record["mixed"]
    return [
        record["policy"],
        f"{one['active_experts']:.1f}",
        f"{one['kept_mass']:.3f}",
        _loss(record, "all"),
        f"{mixed['active_experts']:.1f}",
        _loss(record, "all", batches="mixed"),
        f"{one['agreement']:.1%}",
        f"{one['answers_right']} / {one['answers']}",
    ]


def _loss(record: Mapping[str, Any], text: str, batches: str = "one_domain") -> str:
    return str(Loss(**record[batches]["loss"][text]))


def write_record(path: Path, command: Sequence[str], **content: Any) -> None:
    """Write `content` as JSON with the date, the hardware, the versions and the command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**describe_machine(), "command": list(command), **content}
    path.write_text(json.dumps(record, indent=1, default=str) + "\n")


def write_plot(path: Path, records: Sequence[Mapping[str, Any]], title: str) -> None:
    """Plot the loss above vanilla's against active experts, a line a family of policies, for both kinds of batches."""
    families: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        families.setdefault(family_of(record["policy"]), []).append(record)
    figure, axes = pyplot.subplots(1, len(BATCHES), figsize=(13, 5), sharey=True, layout="constrained")
    for axis, (batches, label) in zip(axes, BATCHES.items(), strict=True):
        for family, members in families.items():
            points = sorted((one[batches]["active_experts"], one[batches]["loss"]["all"]) for one in members)
            experts, losses = [x for x, _ in points], [loss for _, loss in points]
            deltas, errors = ([loss[key] * 1000 for loss in losses] for key in ("delta", "error"))
            axis.errorbar(experts, deltas, yerr=errors, fmt="o-", capsize=2, label=family)
        axis.set(xlabel="active experts a layer and step", title=label)
        axis.set_yscale("symlog", linthresh=1)  # linear below one millinat, where the noise is
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("cross-entropy above vanilla's, millinats a token")
    axes[0].legend()
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def family_of(policy: str) -> str:
    """The policy without its numbers: what one line of a plot joins."""
    variant = parse_variant(policy)
    words = [f"{key}={value}" for key, value in variant.keys.items() if isinstance(value, str)]
    return " ".join([policy.partition(":")[0], *words])
