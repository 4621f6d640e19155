"""Compare expert policies in a real server: `python -m benchmark.serving off xshare:k0=1,add=24 oea:k0=3`.

The benchmark serves one model without a policy and with each policy, and then again with an EAGLE-3 draft model. It
measures the speed of all variants in turns with SGLang's bench_serving. Then it measures the quality of each variant:
the loss on held-out text and the share of solved arithmetic problems. It draws a picture next to the record.
"""

import argparse
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmark.common.command import Parser, folder, policy, run_main
from benchmark.common.paths import BUILD, DRAFT, TEXTS, WIDENED
from benchmark.common.plot import draw
from benchmark.common.speculative import drafting_variant, speculative_flags
from benchmark.common.table import NOTE_WIDTH
from benchmark.common.variant import BASELINE, OFF, SPELLING, parse_variant
from benchmark.serving.measure import add_text, measure_serving
from benchmark.serving.report import plot_serving, tabulate_serving

BUDGETS = tuple(f"xshare:k0=1,add={add}" for add in (24, 16, 8))
POLICIES = (OFF, BASELINE, "xshare", *BUDGETS, "oea:k0=3", "lynx-lat:retain=32")
"""The default policies. `vanilla` runs on the server of the policies, so its ratio shows how much two servers differ
without a policy."""
DRAFTED = (OFF, "xshare", "moe-spec:budget=32")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the policies, print the table and draw the picture."""
    run(make_parser("benchmark.serving", __doc__, BUILD / "serving"), "serving", POLICIES, DRAFTED, argv)


def run(
    parser: Parser, experiment: str, policies: Sequence[str], drafted: Sequence[str], argv: Sequence[str] | None
) -> None:
    """Measure the policies of the command line, print the table and draw the picture.

    `parser` is a result of `make_parser`. `policies` are used if the command line contains no policies. Then `drafted`
    are used too, unless the command line contains `--drafted` or another model.
    """
    args = parser.parse_args(argv)
    if not args.policies:
        args.policies = policies
        if args.drafted is None and args.model == WIDENED:
            args.drafted = drafted
    args.drafted = args.drafted or ()
    for name, given in (("policies", args.policies), ("--drafted", args.drafted)):
        if len(set(given)) < len(given):
            parser.error(f"{name} must differ from each other (got {' '.join(given)})")
    record = parser.open_record(experiment, args, argv)
    points = len(record.points)
    flags = speculative_flags(args.draft, args.topk, args.steps, args.draft_tokens)
    variants = [*map(parse_variant, args.policies)]
    variants += [drafting_variant(parse_variant(text), flags) for text in args.drafted]
    measure_serving(record, args, variants, args.server_args)
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    tabulate_serving(record.points).show(record.path)
    if len(record.points) > points and load > cores:
        print(textwrap.fill(f"Warning: the load average is {load:.1f} on {cores} cores. {BUSY}", NOTE_WIDTH))
    draw(plot_serving(record.points), record.path.with_suffix(".png"))


BUSY = "Other work ran beside this benchmark, and the ratios are those of a busy machine."


def make_parser(module: str, text: str | None, out: Path, per_domain: int = 24, **counts: int) -> Parser:
    """Return the argument parser of a comparison. `per_domain` and `counts` change the defaults of some flags."""
    parser = Parser(module, text)
    parser.add_argument("policies", nargs="*", type=policy, help=f"{SPELLING}; the first is the baseline of the ratios")
    parser.add_checkpoint(WIDENED, TEXTS)
    parser.add_argument("--drafted", nargs="+", type=policy, metavar="POLICY", help="policies with drafts")
    parser.add_argument("--draft", type=folder, default=DRAFT, help="EAGLE-3 draft (default: the trained model's)")
    parser.add_count("steps", 3, "levels of the draft tree")
    parser.add_count("topk", 1, "branches of the draft tree")
    parser.add_count("draft_tokens", 4, "tokens verified a request")
    parser.add_counts(**counts)
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts (default: 0)")
    add_text(parser, per_domain)
    parser.add_record(out)
    parser.add_argument("--server-args", nargs=argparse.REMAINDER, default=[], help="flags of every server, last")
    return parser


if __name__ == "__main__":
    run_main("serving", main)
