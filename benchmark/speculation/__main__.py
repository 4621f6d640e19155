"""Policies when EAGLE-3 drafts are verified, side by side: `python -m benchmark.speculation xshare moe-spec:budget=32`.

Serves the trained checkpoint without speculation, with EAGLE-3, and with EAGLE-3 under every policy; measures them in
turns with upstream's bench_serving: output tokens/s, accepted length, active experts. Beside it quality: the share of
arithmetic problems the server answers right, and the loss of held-out text whose steps are laid out as verification.
"""

import argparse
import sys
from pathlib import Path

from benchmark.common.paths import BUILD, DRAFT, TEXTS, TRAINED
from benchmark.common.plan import BASELINE
from benchmark.common.rounds import Workload, run_rounds, serve
from benchmark.common.server import one_line_errors
from benchmark.common.speculative import speculative_flags
from benchmark.common.variant import SPELLING, Variant, parse_variant
from benchmark.quality.compare import policy_quality
from benchmark.quality.served import measure_sums
from benchmark.quality.workload import Workload as Text
from benchmark.serving.report import Comparison, describe_workload, print_table, write_plot, write_record

POLICIES = ("xshare", "xshare:k0=1,add=24", "oea:k0=3", "moe-spec:budget=32")


def main() -> None:
    """Measure, print the table, write the record and the plot."""
    args = _parse_args()
    flags = speculative_flags(DRAFT, args.topk, args.steps, args.draft_tokens)
    policies = [parse_variant(text, flags) for text in args.policies]
    drafting = [Variant(f"EAGLE-3, {one.name}", one.policy, one.keys, flags) for one in policies]
    variants = [Variant("off", None, {}), Variant("EAGLE-3, vanilla", "vanilla", {}, flags), *drafting]
    workload = Workload(TRAINED, TEXTS, rounds=args.rounds, requests=96)
    steps = 128 // args.draft_tokens * args.draft_tokens
    text = Text(TRAINED, TEXTS, steps=steps, batch=16, tokens_per_request=args.draft_tokens)
    losses = {one["policy"]: one["mixed"]["loss"]["all"]["delta"] for one in policy_quality(text, args.policies)}
    with serve(TRAINED, variants) as servers:
        series = run_rounds(workload, variants, servers)
        sums: list[float | None] = [measure_sums(server, TEXTS) for server in servers]
    quality = {"sums right": sums, "loss": [None, losses[BASELINE], *(losses[name] for name in args.policies)]}
    comparison = Comparison(workload, series, quality)
    tree = f"{args.steps} steps, top-k {args.topk}, {args.draft_tokens} draft tokens"
    title = f"{TRAINED.name}, EAGLE-3 with {tree}: {describe_workload(workload)}"
    print_table(title, [comparison])
    print(f"Loss: nats a token above vanilla's, {text.layout} a step, the domains mixed.")
    write_record(args.out / "speculation.json", sys.argv, [comparison])
    write_plot(args.out / "speculation.png", title, [comparison])
    print(f"Record: {args.out / 'speculation.json'}, plot: {args.out / 'speculation.png'}")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark.speculation", description=__doc__)
    parser.add_argument("policies", nargs="*", default=POLICIES, help=f"{SPELLING} (default: {' '.join(POLICIES)})")
    parser.add_argument("--steps", type=int, default=3, help="levels of the draft tree (default: 3)")
    parser.add_argument("--topk", type=int, default=1, help="branches of the draft tree (default: 1)")
    parser.add_argument("--draft-tokens", type=int, default=4, help="tokens verified a request (default: 4)")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (default: 5)")
    parser.add_argument("--out", type=Path, default=BUILD / "speculation", help="folder of the results")
    args = parser.parse_args()
    if BASELINE in args.policies or len(set(args.policies)) < len(args.policies):
        parser.error(f"policies {' '.join(args.policies)}: each may be given once, and {BASELINE} is there already")
    return args


if __name__ == "__main__":
    with one_line_errors("speculation"):
        main()
