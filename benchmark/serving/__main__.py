"""Compare expert policies in the real server: `python -m benchmark.serving off xshare:k0=1,add=24 oea:k0=3`.

Serves one model without a policy and with each, and the same with an EAGLE-3 draft; measures all in turns with
upstream's bench_serving, then what each costs: the loss of held-out text, and sums.
"""

import argparse
from collections.abc import Sequence

from benchmark.common.command import Parser, folder, policy, run_main
from benchmark.common.paths import BUILD, DRAFT, TEXTS, WIDENED
from benchmark.common.speculative import drafting_variant, speculative_flags
from benchmark.common.variant import OFF, SPELLING, parse_variant
from benchmark.serving.measure import add_text, measure_serving
from benchmark.serving.report import tabulate_serving

POLICIES = (OFF, "xshare", *(f"xshare:k0=1,add={add}" for add in (24, 16, 8)), "oea:k0=3", "lynx-lat:retain=32")
DRAFTED = (OFF, "xshare", "moe-spec:budget=32")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure into the record, print the table."""
    parser = _make_parser()
    args = parser.parse_args(argv)
    if not args.policies:
        args.policies = POLICIES
        if args.drafted is None and args.model == WIDENED:
            args.drafted = DRAFTED
    args.drafted = args.drafted or ()
    for name, given in (("policies", args.policies), ("--drafted", args.drafted)):
        if len(set(given)) < len(given):
            parser.error(f"{name} {' '.join(given)}: each may be given once")
    record = parser.open_record("serving", args, argv)
    flags = speculative_flags(args.draft, args.topk, args.steps, args.draft_tokens)
    drafted = [drafting_variant(parse_variant(text), flags) for text in args.drafted]
    variants = [*map(parse_variant, args.policies), *drafted]
    measure_serving(record, args, variants, args.server_args)
    tabulate_serving(record.points).show(record.path)


def _make_parser() -> Parser:
    parser = Parser("benchmark.serving", __doc__)
    default = f"the first is the baseline of the ratios (default: {' '.join(POLICIES)})"
    parser.add_argument("policies", nargs="*", type=policy, help=f"{SPELLING}; {default}")
    parser.add_checkpoint(WIDENED, TEXTS)
    drafted = f"policies with drafts (default: none, or where no policy is given {' '.join(DRAFTED)})"
    parser.add_argument("--drafted", nargs="+", type=policy, metavar="POLICY", help=drafted)
    parser.add_argument("--draft", type=folder, default=DRAFT, help="EAGLE-3 draft (default: the trained model's)")
    parser.add_count("steps", 3, "levels of the draft tree")
    parser.add_count("topk", 1, "branches of the draft tree")
    parser.add_count("draft_tokens", 4, "tokens verified a request")
    parser.add_counts()
    parser.add_argument("--seed", type=int, default=0, help="chooses the prompts (default: 0)")
    add_text(parser)
    parser.add_record(BUILD / "serving")
    parser.add_argument("--server-args", nargs=argparse.REMAINDER, default=[], help="the rest goes to every server")
    return parser


if __name__ == "__main__":
    run_main("serving", main)
