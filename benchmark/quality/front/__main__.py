"""Measure the gain from `own_share` and squared utilities: `python -m benchmark.quality.front [POLICY...]`.

Measures published settings of policies in decode steps and in verify steps. Then measures the same settings with
`own_share` 0.75. Policies with a budget by utility are also measured with squared utilities. The batches contain text
of several domains. `--skip` skips the first sequences of each domain, because the keys were chosen on them.
"""

from collections.abc import Sequence
from itertools import product

from benchmark.common.command import policy, run_main
from benchmark.common.paths import BUILD
from benchmark.quality.front.ladders import POLICIES, changes_of, family_of, ladder_of, settings_of, swept_of
from benchmark.quality.front.report import plot_front, tabulate_gains, tabulate_own_share
from benchmark.quality.model import Layout
from benchmark.quality.sweep import Point, make_parser, run_sweep
from sglang_xshare import Router

BATCHES, TOKENS = (4, 16, 64), (1, 4)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the tables and draw the picture."""
    parser = make_parser("benchmark.quality.front", __doc__, BATCHES, TOKENS, steps=64)
    help = "settings as published (default: ladders of each policy, for the model's number of experts)"
    parser.add_argument("policies", nargs="*", type=policy, help=help)
    parser.add_record(BUILD / "quality" / "front")
    args = parser.parse_args(argv)
    for setting in args.policies:
        if family_of(setting) not in POLICIES:
            parser.error(f"policy must be a setting of {', '.join(POLICIES)} (got {setting})")
    record = parser.open_record("front", args, argv)

    def list_points(layout: Layout, text: str, router: Router, experts: int) -> list[Point]:
        swept = swept_of(experts, layout)
        return [
            Point(
                f"{layout}, {setting}",
                changes_of(setting, setting in swept),
                {"ladder": ladder_of(setting), "setting": setting},
            )
            for setting in args.policies or settings_of(experts, layout)
        ]

    fewest_steps_first = product(sorted(args.batch, reverse=True), args.tokens_per_request)
    run_sweep(record, args, [Layout(*both) for both in fewest_steps_first], list_points)
    models = [args.model.name]
    tabulate_gains(record.points, models=models).show()
    tabulate_own_share(record.points, models=models).show(record.path)
    plot_front(record.points, record.path)


if __name__ == "__main__":
    run_main("front", main)
