"""Policies when EAGLE-3 drafts are verified, side by side: `python -m benchmark.speculation xshare moe-spec:budget=32`.

Serves a checkpoint without speculation, with EAGLE-3, and with EAGLE-3 under every policy; measures them in turns with
upstream's bench_serving: output tokens/s, accepted length, active experts. Beside it quality: the share of arithmetic
problems the server answers right, and the loss of held-out text whose steps are laid out as verification.
"""

import argparse
from collections.abc import Sequence

from benchmark.common.command import COUNTS, Parser, folder, one_line_errors, policy
from benchmark.common.comparison import is_measured, measure
from benchmark.common.paths import BUILD, DRAFT, TRAINED
from benchmark.common.plot import plot_speed
from benchmark.common.record import Record
from benchmark.common.rounds import Workload, serve
from benchmark.common.speculative import drafting_variant, speculative_flags
from benchmark.common.variant import BASELINE, OFF, PLAN_SPELLING, Variant, parse_variant
from benchmark.quality.compare import policy_quality
from benchmark.quality.decoding import Decoding
from benchmark.quality.served import measure_sums
from benchmark.speculation.report import ROUNDS, SUMS, loss_key, read_comparison, tabulate_speculation

POLICIES = ("xshare", "xshare:k0=1,add=24", "oea:k0=3", "moe-spec:budget=32")
LARGEST_BATCH = 16


def main(argv: Sequence[str] | None = None) -> None:
    """Measure into the record, print the table, write the plot."""
    parser = _make_parser()
    args = parser.parse_args(argv)
    if BASELINE in args.policies or len(set(args.policies)) < len(args.policies):
        parser.error(f"policies {' '.join(args.policies)}: each may be given once, and {BASELINE} is there already")
    args.texts = args.texts or args.model / "heldout"
    record = parser.open_record("speculation", args, argv)
    measure_losses(args, record)
    if not is_measured(record, ROUNDS) or SUMS not in record:
        measure_rounds(args, record)
    tabulate_speculation(record.points).show()
    tree = f"{args.steps} steps, top-k {args.topk}, {args.draft_tokens} draft tokens"
    title = f"Speed over active experts, drafts verified: EAGLE-3 with {tree}"
    plot_speed(args.out / "speculation.png", [read_comparison(record.points)], title)
    print(f"Record: {record.path}, plot: {args.out / 'speculation.png'}")


def measure_losses(args: argparse.Namespace, record: Record) -> None:
    """The quality of every policy that the record lacks, in steps as verification has them."""
    missing = [text for text in (BASELINE, *args.policies) if loss_key(text) not in record]
    if not missing:
        return
    tokens = args.draft_tokens
    decoding = Decoding(
        args.model,
        args.texts,
        per_domain=args.per_domain,
        steps=max(1, args.loss_tokens // tokens) * tokens,
        batch=min(args.per_domain, LARGEST_BATCH),
        tokens_per_request=tokens,
    )
    for text, figures in policy_quality(decoding, missing):
        record.add(loss_key(text), **figures)


def measure_rounds(args: argparse.Namespace, record: Record) -> None:
    """Speed of all variants in turns, and the sums they get right."""
    flags = speculative_flags(args.draft, args.topk, args.steps, args.draft_tokens)
    policies = [parse_variant(text) for text in (BASELINE, *args.policies)]
    variants = [Variant(OFF, None, {}), *(drafting_variant(one, flags) for one in policies)]
    workload = Workload(args.model, args.texts, **{name: getattr(args, name) for name in COUNTS})
    with serve(args.model, variants) as servers:
        measure(record, ROUNDS, workload, variants, servers)
        record.add(SUMS, shares=[measure_sums(server, args.texts, args.sums) for server in servers])


def _make_parser() -> Parser:
    parser = Parser("benchmark.speculation", __doc__)
    default = f"{PLAN_SPELLING} (default: {' '.join(POLICIES)})"
    parser.add_argument("policies", nargs="*", type=policy, default=POLICIES, help=default)
    parser.add_argument("--model", type=folder, default=TRAINED, help="checkpoint folder (default: the trained one)")
    parser.add_argument("--draft", type=folder, default=DRAFT, help="its EAGLE-3 draft (default: the trained one's)")
    parser.add_argument("--texts", type=folder, help="folder of *.txt, a domain each (default: the model's heldout/)")
    parser.add_count("steps", 3, "levels of the draft tree")
    parser.add_count("topk", 1, "branches of the draft tree")
    parser.add_count("draft_tokens", 4, "tokens verified a request")
    parser.add_counts(requests=96)
    parser.add_count("sums", 160, "arithmetic problems")
    parser.add_count("per_domain", 32, "sequences of each domain whose loss is taken")
    parser.add_count("loss_tokens", 128, "tokens of each sequence whose loss is taken")
    parser.add_record(BUILD / "speculation")
    return parser


if __name__ == "__main__":
    with one_line_errors("speculation"):
        main()
