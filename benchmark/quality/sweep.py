"""The common code of `front`, `defaults` and `drafts`. They measure many policies with several layouts of steps."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from typing import Any

import torch

from benchmark.common.command import Parser
from benchmark.common.record import Record
from benchmark.common.variant import BASELINE, parse_plan
from benchmark.quality.decoding import add_decoding, read_decoding
from benchmark.quality.measure import Bench, Decoded, compare_loss, losses_by_batch
from benchmark.quality.model import Layout, router_of
from sglang_xshare import Router

COUNTS = ("per_domain", "prompt", "steps")
MIXED, ONE_DOMAIN = "mixed", "one domain"


@dataclass(frozen=True)
class Point:
    """A point of the record.

    `policies` maps names to policies. The first policy is the one with which the others are compared. `fields` contains
    additional fields of the point. `layout` is the layout of the policies' steps, if it differs from vanilla's.
    """

    key: str
    policies: Mapping[str, str]
    fields: Mapping[str, Any] = field(default_factory=dict)
    layout: Layout | None = None


List = Callable[[Layout, str, Router, int], Sequence[Point]]
"""A function that returns the points to measure.

Its arguments are a layout, the kind of text, the model's router and the number of experts.
"""


def make_parser(module: str, text: str | None, batches: Sequence[int], tokens: Sequence[int], **counts: int) -> Parser:
    """Return a parser with the flags that every sweep has. `counts` changes the defaults of some flags in `COUNTS`."""
    parser = Parser(module, text)
    parser.add_numbers("batch", batches, "requests of a step")
    parser.add_numbers("tokens_per_request", tokens, "tokens of a request in a step; above 1, drafts are verified")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="sequences of each domain to skip first")
    add_decoding(parser, COUNTS, **counts)
    return parser


def run_sweep(
    record: Record,
    args: argparse.Namespace,
    layouts: Sequence[Layout],
    list_points: List,
    texts: Sequence[str] = (MIXED,),
) -> None:
    """Measure all points that are missing in the record. `args` must contain the flags of `make_parser`.

    Raises ValueError before the first measurement if a policy, the model or the text cannot be used.
    """
    decoding = read_decoding(args, batch=1, tokens_per_request=1)
    model, sequences = decoding.load()
    router, experts = router_of(model)
    planned = [(*both, list_points(*both, router, experts)) for both in product(layouts, texts)]
    for layout, text, points in planned:
        layout.check(decoding.per_domain if text == ONE_DOMAIN else len(sequences), decoding.steps)
        for policy in (policy for point in points for policy in point.policies.values()):
            parse_plan(policy, layout.rows).check(router, experts)
    order = {ONE_DOMAIN: sequences, MIXED: sequences.mix()}
    benches = {text: Bench(model, order[text], decoding.prompt) for text in texts}
    for layout, text, points in planned:
        missing = [point for point in points if point.key not in record]
        if missing:
            counted = layout.count(len(sequences), decoding.steps)
            vanilla = benches[text].run(parse_plan(BASELINE), layout)
            for point in missing:
                record.add(point.key, **_measure(benches[text], layout, point, vanilla, counted))


def _measure(bench: Bench, layout: Layout, point: Point, vanilla: Decoded, counted: torch.Tensor) -> dict[str, Any]:
    """Measure a point and return its fields. If it has several policies, `changes` contains the fields of each one."""
    found: dict[str, dict[str, Any]] = {}
    first: Decoded | None = None
    for name, policy in point.policies.items():
        decoded = bench.run(parse_plan(policy, layout.rows), point.layout or layout)
        first = first or decoded
        loss = compare_loss(decoded.nats, vanilla.nats, counted, layout.batch)
        print(f"{point.key}, {policy}: {decoded.active:.1f} of {vanilla.active:.1f} experts, {loss} nats", flush=True)
        found[name] = {
            **{"policy": policy, "active_experts": decoded.active, "kept_mass": decoded.kept_mass},
            **{"loss": asdict(loss), "losses": losses_by_batch(decoded, vanilla, counted)},
            "over_published": asdict(compare_loss(decoded.nats, first.nats, counted, layout.batch)),
        }
    start = {"batch": layout.batch, "tokens_per_request": layout.tokens_per_request, "vanilla_active": vanilla.active}
    return {**start, **point.fields, **({"changes": found} if len(found) > 1 else next(iter(found.values())))}
