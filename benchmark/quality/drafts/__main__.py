"""Measure the cost of selection if some draft tokens are wrong: `python -m benchmark.quality.drafts`.

Simulates verify steps under several settings of `xshare`. Each batch contains text of several domains. Some settings
weight each draft token by its chance of acceptance.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from benchmark.common.command import run_main
from benchmark.common.paths import BUILD
from benchmark.quality.drafts.layout import Drafted
from benchmark.quality.drafts.report import BY_OWN, KINDS, TOLD, tabulate_drafts
from benchmark.quality.model import Layout
from benchmark.quality.sweep import Point, make_parser, run_sweep
from sglang_xshare import Router

SETTING = "xshare:k0=1,utility=squared,own_share=0.75,add={}{}"
ADDS = (4, 8, 12, 16, 24)
BATCHES, TOKENS, CHANCES = (1, 4), (8, 16), (0.75, 0.5, 0.9)
SPREAD = 0.25
"""The spread of the first chance. The first chance is also measured without a spread."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the table."""
    parser = make_parser("benchmark.quality.drafts", __doc__, BATCHES, TOKENS, per_domain=16)
    parser.add_numbers("add", ADDS, "budgets")
    parser.add_numbers("chance", CHANCES, "chance that a draft is right if all before it are", float)
    parser.add_record(BUILD / "quality" / "drafts")
    args = parser.parse_args(argv)
    for chance in args.chance:
        if not 0 < chance <= 1:
            parser.error(f"--chance must be above 0 and at most 1 (got {chance})")
    first = args.chance[0]
    chances = [(first, 0.0), (first, min(SPREAD, first / 2, 1 - first)), *((chance, 0.0) for chance in args.chance[1:])]
    shapes = product(dict.fromkeys(chances), args.batch, args.tokens_per_request)
    layouts = [Drafted(batch, tokens, *chance) for chance, batch, tokens in shapes]
    record = parser.open_record("drafts", args, argv)

    def list_points(layout: Layout, text: str, router: Router, experts: int) -> list[Point]:
        assert isinstance(layout, Drafted)
        fields = {"chance": layout.chance, "spread": layout.spread}
        return [
            Point(
                f"{layout}, {kind}, add={add}",
                {kind: SETTING.format(add, KINDS[kind])},
                {**fields, "kind": kind},
                replace(layout, told=kind == TOLD, own=kind == BY_OWN),
            )
            for kind, add in product(KINDS, args.add)
        ]

    run_sweep(record, args, layouts, list_points)
    tabulate_drafts(record.points).show(record.path)


if __name__ == "__main__":
    run_main("drafts", main)
