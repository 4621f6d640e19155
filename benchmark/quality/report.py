"""Tables and a picture of the quality of policies."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.common.plot import Line, Panel, Picture
from benchmark.common.table import Table
from benchmark.quality.measure import explain_errors, find_margin, format_loss

NOTE = """\
Batches of one domain and mixed batches hold the same sequences; only their neighbours differ. Loss: cross-entropy above
vanilla's on the same tokens, in nats a token. Greedy same: share of tokens whose most likely token is vanilla's."""
DIVERGENCE_NOTE = """\
KL: the divergence of the predictions from vanilla's, a lower bound by the likeliest tokens of both."""
ACCEPTED_NOTE = "Accepted: tokens of a verify step; offline, the draft is the text itself."


def tabulate_quality(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each policy. Batches of one domain come first, then mixed batches."""
    mixed = ["experts", "kept mass", "loss, nats", "greedy same", "sums right", "KL, nats"]
    rows = [[policy, *_cells(point["one_domain"], point["mixed"])] for policy, point in points.items()]
    figures = [point["mixed"] for point in points.values()]
    errors = explain_errors(one["loss"]["all"] for one in figures)
    vanilla = f"Vanilla's cross-entropy is {figures[0]['loss']['all']['cross_entropy']:.3f} nats a token."
    note = f"{NOTE} {errors} {vanilla} {DIVERGENCE_NOTE}"
    if all("accepted" in one for one in figures):
        mixed.append("accepted")
        note = f"{note} {ACCEPTED_NOTE}"
        rows = [[*row, f"{one['accepted']:.2f}"] for row, one in zip(rows, figures, strict=True)]
    headings = ["policy", "one domain: experts", "one domain: loss, nats", *(f"mixed: {kind}" for kind in mixed)]
    return Table("Quality of policies", headings, rows, note)


def tabulate_domains(points: Mapping[str, Any]) -> Table:
    """Return a table with one row for each policy and one column for each domain. Each batch has one domain."""
    domains = [name for name in next(iter(points.values()))["one_domain"]["loss"] if name != "all"]
    losses = {policy: point["one_domain"]["loss"] for policy, point in points.items()}
    rows = [[policy, *(format_loss(loss[domain]) for domain in domains)] for policy, loss in losses.items()]
    return Table("Loss by domain, in batches of one domain, nats", ["policy", *domains], rows)


def plot_quality(points: Mapping[str, Any]) -> Picture:
    """Return a picture of loss against active experts in mixed batches.

    Each policy and kind of budget has one line.
    """
    first, *others = points.items()
    ladders: dict[str, list[Mapping[str, Any]]] = {}
    for name, point in others:
        figures = point["mixed"]
        ladder = f"{name.rpartition('=')[0]}=" if "=" in name else name
        ladders.setdefault(ladder, []).append({**figures, "loss": figures["loss"]["all"]})
    lines = [make_loss_line(name, found) for name, found in ladders.items()]
    title = f"mixed batches; {first[0]} has {first[1]['mixed']['active_experts']:.1f} active"
    errors = explain_errors(one["loss"] for found in ladders.values() for one in found)
    return Picture((make_loss_panel(lines, title),), errors.replace("±", "error bars").partition(";")[0])


def make_loss_line(name: str, settings: Sequence[Mapping[str, Any]]) -> Line:
    """Return a line of loss against active experts, with error bars. The settings differ only in their budget."""
    order = sorted(settings, key=lambda one: one["active_experts"])
    experts, losses = [one["active_experts"] for one in order], [one["loss"] for one in order]
    return Line(name, experts, [loss["delta"] for loss in losses], [find_margin(loss) for loss in losses])


def make_loss_panel(lines: Sequence[Line], title: str) -> Panel:
    """Return a panel of loss against active experts. Its y axis is logarithmic."""
    return Panel("active experts a layer and step", "loss above vanilla, nats a token", lines, title, log_y=True)


def _cells(one: Mapping[str, Any], mixed: Mapping[str, Any]) -> list[str]:
    divergence = {**mixed["divergence"], "delta": mixed["divergence"]["nats"]}
    return [
        f"{one['active_experts']:.1f}",
        format_loss(one["loss"]["all"]),
        f"{mixed['active_experts']:.1f}",
        f"{mixed['kept_mass']:.3f}",
        format_loss(mixed["loss"]["all"]),
        f"{mixed['agreement']:.1%}",
        f"{mixed['answers_right']} / {mixed['answers']}" if mixed["answers"] else "-",
        format_loss(divergence).removeprefix("+"),
    ]
