"""The report of a search, which contains the trials and the chosen settings by layer."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from .measure import Loss
from .plans import name_layers
from .search import Found


def print_found(found: Found, console: Console) -> None:
    """Print every trial at one batch size, and the settings of the chosen trial."""
    limit = f"{found.tolerance:.4f} of {found.cross_entropy:.3f} nats tolerated"
    title = f"{found.batch} rows: {limit}; under vanilla {found.before:.1f} {found.unit}"
    table = Table(title=title, title_justify="left")
    for heading in ("tried", found.unit, "loss, nats", "held out", "predicted", "kept mass", "greedy agreement"):
        table.add_column(heading, justify="left" if heading == "tried" else "right")
    for number, trial in enumerate(found.trials, 1):
        name = f"{number}{', chosen' if trial is found.chosen else ''}"
        mass = "-" if trial.kept_mass is None else f"{trial.kept_mass:.3f}"
        held_out = format_loss(trial.held_out) if trial.held_out else "-"
        losses = format_loss(trial.loss), held_out, f"{trial.predicted:.4f}"
        table.add_row(name, f"{trial.experts:.1f}", *losses, mass, f"{trial.agreement:.1%}")
    console.print(table)
    if found.chosen is not None:
        for group, setting in found.chosen.settings.items():
            console.print(f"  layers {name_layers(group)}: {setting}")


def summarize(found: Found) -> str:
    """Return one line with the chosen trial's figures on the held-out samples."""
    chosen = found.chosen
    if chosen is None or chosen.held_out is None:
        return f"{found.batch} rows: vanilla, because no trial stays within the tolerance."
    low, high = chosen.held_out.interval
    interval = f"95 % confidence [{low:.4f}, {high:.4f}]"
    if not found.is_sure:
        interval += ", which reaches past the tolerance: more --samples narrow it"
    return (
        f"{found.batch} rows, held-out samples: {chosen.held_out_experts:.1f} {found.unit} in place of "
        f"{found.before:.1f}; greedy agreement {chosen.held_out_agreement:.1%}; loss {format_loss(chosen.held_out)} "
        f"nats of {found.tolerance:.4f} tolerated, {interval}."
    )


def format_loss(loss: Loss) -> str:
    """Return the loss in nats with its standard error."""
    return f"{loss.delta:+.4f} ± {loss.error:.4f}"


def describe_found(found: Found) -> dict[str, Any]:
    """Return the result in the form of the JSON report."""
    trials = [
        asdict(trial) | {"settings": {name_layers(group): one for group, one in trial.settings.items()}}
        for trial in found.trials
    ]
    return {
        "batch": found.batch,
        "tolerance_nats": found.tolerance,
        "cross_entropy": found.cross_entropy,
        "counted": found.unit,
        "experts_before": found.before,
        "options": {name_layers(group): [asdict(one) for one in options] for group, options in found.options.items()},
        "trials": trials,
        "chosen": None if found.chosen is None else found.trials.index(found.chosen),
        "greedy_agreement": None if found.chosen is None else found.chosen.held_out_agreement,
        "interval_within_tolerance": found.is_sure,
    }
