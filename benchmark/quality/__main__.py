"""Measure how much quality policies cost: `python -m benchmark.quality vanilla xshare:k0=1,add=24 oea:k0=3`."""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmark.common.command import Parser, policy, run_main
from benchmark.common.paths import BUILD
from benchmark.common.plot import draw
from benchmark.common.variant import BASELINE, PLAN_SPELLING
from benchmark.quality.compare import policy_quality
from benchmark.quality.decoding import add_decoding, read_decoding
from benchmark.quality.instrument import find_instrument
from benchmark.quality.measure import MOST, TOP
from benchmark.quality.report import plot_quality, tabulate_domains, tabulate_quality
from benchmark.quality.running import measure_running
from sglang_xshare.live.client import API_KEY
from sglang_xshare.parser import whole

OUT = BUILD / "quality"
SERVED = OUT / "served"
"""The folder for records of a running server. They must not replace the records of offline decoding."""
POLICIES = (
    *(f"xshare:k0=1,add={add}" for add in (24, 16, 12, 8)),
    *(f"xshare:k0=1,mass={mass}" for mass in (0.9, 0.8)),
    *(f"xshare:k0=1,add={add},utility=full" for add in (16, 8)),
    *(f"oea:k0={k0}" for k0 in (5, 4, 3, 2)),
    *(f"lynx-lat:retain={retain}" for retain in (40, 32, 24, 16)),
    *(f"lynx-acc:confidence={keys}" for keys in ("0.05,max_voters=16", "0.1", "0.3")),
    *(f"moe-spec:budget={budget}" for budget in (32, 24, 16)),
    *(f"pruned:k0={k0}" for k0 in (6, 5, 4, 3)),
    *(f"dynamic-skip:beta={beta}" for beta in (0.1, 0.3)),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the tables and draw the picture."""
    parser = Parser("benchmark.quality", __doc__)
    parser.add_policies(policy, POLICIES, f"{PLAN_SPELLING}; vanilla is always the baseline")
    add_decoding(parser)
    help = f"likeliest tokens from which divergence is computed (default: {TOP})"
    parser.add_argument("--top", type=whole(2, MOST), help=help)
    parser.add_argument(
        "--url", help="URL of a running server, which decodes instead of this process: docs/tune.md has its flags"
    )
    parser.add_argument("--api-key", help=f"the server's admin or API key (default: ${API_KEY})")
    parser.add_argument("--prompts", type=Path, help="with --url: JSON lines of your own prompts, in place of --texts")
    parser.add_record(OUT)
    args = parser.parse_args(argv)
    key = args.api_key
    del args.api_key  # a record contains all arguments and the command, so the key must be removed from both
    argv = [word.replace(key, "KEY") if key else word for word in (sys.argv[1:] if argv is None else argv)]
    decoding, top = read_decoding(args), args.top or TOP
    if decoding.per_domain < 2:
        raise ValueError(f"--per-domain must be at least 2, for an error (got {decoding.per_domain})")
    if args.url is None:
        for name, value in (("--prompts", args.prompts), ("--api-key", key)):
            if value is not None:
                raise ValueError(f"{name} must be used with --url")
        record = parser.open_record("quality", args, argv)
        measure = partial(policy_quality, decoding, top=top)
    else:
        _check_asked(args)
        args.out = SERVED if args.out == OUT else args.out
        server = find_instrument(args.url, key or os.environ.get(API_KEY))
        args.model = server.get_model()
        record = parser.open_record("quality", args, argv)
        measure = partial(measure_running, server, args.prompts, decoding, top=top)
    missing = [text for text in (BASELINE, *args.policies) if text not in record]
    for text, figures in measure(missing) if missing else ():
        record.add(text, **figures)
    tabulate_quality(record.points).show()
    tabulate_domains(record.points).show(record.path)
    draw(plot_quality(record.points), record.path.with_suffix(".png"))


def _check_asked(args: argparse.Namespace) -> None:
    if args.prompts is not None and args.texts is not None:
        raise ValueError(f"--prompts must be used without --texts (got {args.prompts} and {args.texts})")
    if args.tokens_per_request != 1:
        asked = f"(got {args.tokens_per_request})"
        raise ValueError(f"--tokens-per-request must be 1 with --url: the server's own speculation decides {asked}")


if __name__ == "__main__":
    run_main("quality", main)
