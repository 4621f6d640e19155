"""A record of policies' quality on paper: the tables."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmark.common.table import Table

NOTE = """\
Batches of one domain and mixed ones hold the same sequences; only their neighbours differ. Loss: cross-entropy above
vanilla's on the same tokens, in nats a token, ± the standard error of the paired differences; within
two errors a figure says nothing. Greedy same: tokens for which the most likely one is vanilla's."""
DIVERGENCE_NOTE = """\
KL: the divergence of the predictions from vanilla's, bounded from below by the likeliest tokens of both."""
ACCEPTED_NOTE = "Accepted: tokens of a verify step; offline, where the draft is the text itself."


def tabulate_quality(points: Mapping[str, Any]) -> Table:
    """A row a policy: its figures in batches of one domain, then in mixed ones."""
    mixed = ["experts", "kept mass", "loss, nats", "greedy same", "sums right"]
    rows = [[policy, *_cells(point["one_domain"], point["mixed"])] for policy, point in points.items()]
    first = next(iter(points.values()))["mixed"]
    note = f"{NOTE} Vanilla's cross-entropy is {first['loss']['all']['cross_entropy']:.3f} nats a token."
    figures = [point["mixed"] for point in points.values()]
    for kind, heading, more, spell in MORE:
        if all(kind in one for one in figures):  # older records have none
            mixed.append(heading)
            note = f"{note} {more}"
            for row, one in zip(rows, figures, strict=True):
                row.append(spell(one[kind]))
    headings = ["policy", "one domain: experts", "one domain: loss, nats", *(f"mixed: {kind}" for kind in mixed)]
    return Table("Quality of policies", headings, rows, note)


def _format_divergence(divergence: Mapping[str, float]) -> str:
    return f"{divergence['nats']:.4f} ± {divergence['error']:.4f}"


MORE: tuple[tuple[str, str, str, Callable[[Any], str]], ...] = (
    ("divergence", "KL, nats", DIVERGENCE_NOTE, _format_divergence),
    ("accepted", "accepted", ACCEPTED_NOTE, "{:.2f}".format),
)
"""Figures that not every record has: key, heading, note, and how they are spelt."""


def tabulate_domains(points: Mapping[str, Any]) -> Table:
    """A row a policy: its loss in each domain, in batches of one domain."""
    domains = [name for name in next(iter(points.values()))["one_domain"]["loss"] if name != "all"]
    losses = {policy: point["one_domain"]["loss"] for policy, point in points.items()}
    rows = [[policy, *(format_loss(loss[domain]) for domain in domains)] for policy, loss in losses.items()]
    return Table("Loss by domain, in batches of one domain, nats", ["policy", *domains], rows)


def format_loss(loss: Mapping[str, float]) -> str:
    """The difference to vanilla in nats, with its error."""
    return f"{loss['delta']:+.4f} ± {loss['error']:.4f}"


def _cells(one: Mapping[str, Any], mixed: Mapping[str, Any]) -> list[str]:
    return [
        f"{one['active_experts']:.1f}",
        format_loss(one["loss"]["all"]),
        f"{mixed['active_experts']:.1f}",
        f"{mixed['kept_mass']:.3f}",
        format_loss(mixed["loss"]["all"]),
        f"{mixed['agreement']:.1%}",
        f"{mixed['answers_right']} / {mixed['answers']}" if mixed["answers"] else "-",
    ]
