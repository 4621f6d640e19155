"""Compare expert policies in the real server: `python -m benchmark.serving vanilla xshare:k0=1,add=24 oea:k0=3`."""

import argparse
from collections.abc import Sequence

from benchmark.common.command import COUNTS, Parser, folder, one_line_errors, policy
from benchmark.common.comparison import Comparison, is_measured, measure
from benchmark.common.large_model import make
from benchmark.common.paths import BUILD, LARGE, TEXTS
from benchmark.common.plot import plot_speed
from benchmark.common.rounds import Workload, serve
from benchmark.common.variant import SPELLING, parse_variant
from benchmark.serving.report import KEY, tabulate_serving

POLICIES = ("vanilla", "xshare:k0=1,add=24", "xshare:k0=1,add=16", "oea:k0=3", "lynx-lat:retain=40")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure into the record, print the table, write the plot."""
    parser = Parser("benchmark.serving", __doc__)
    default = f"the first is the baseline of the ratios (default: {' '.join(POLICIES)})"
    parser.add_argument("policies", nargs="*", type=policy, default=POLICIES, help=f"{SPELLING}; {default}")
    parser.add_argument("--model", type=folder, default=LARGE, help="checkpoint folder (default: the generated one)")
    parser.add_argument("--texts", type=folder, default=TEXTS, help="*.txt for prompts (default: the trained model's)")
    parser.add_counts()
    parser.add_argument("--seed", type=int, default=0, help="chooses the prompts (default: 0)")
    parser.add_record(BUILD / "serving")
    parser.add_argument("--server-args", nargs=argparse.REMAINDER, default=[], help="the rest goes to every server")
    args = parser.parse_args(argv)
    if len(set(args.policies)) < len(args.policies):
        parser.error(f"policies {' '.join(args.policies)}: each may be given once")
    record = parser.open_record("serving", args, argv)
    if not is_measured(record, KEY):
        if args.model == LARGE:
            make()
        counts = {name: getattr(args, name) for name in COUNTS}
        workload = Workload(args.model, args.texts, seed=args.seed, **counts)
        variants = [parse_variant(text) for text in args.policies]
        with serve(args.model, variants, args.server_args) as servers:
            measure(record, KEY, workload, variants, servers)
    tabulate_serving(record.points).show()
    plot_speed(args.out / "serving.png", [Comparison.read(record.points[KEY])])
    print(f"Record: {record.path}, plot: {args.out / 'serving.png'}")


if __name__ == "__main__":
    with one_line_errors("serving"):
        main()
