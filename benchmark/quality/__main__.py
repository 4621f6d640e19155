"""What policies cost in quality: `python -m benchmark.quality vanilla xshare:k0=1,add=24 oea:k0=3`."""

from collections.abc import Sequence

from benchmark.common.command import Parser, one_line_errors, policy
from benchmark.common.paths import BUILD
from benchmark.common.variant import BASELINE, PLAN_SPELLING
from benchmark.quality.compare import policy_quality
from benchmark.quality.decoding import add_decoding, read_decoding
from benchmark.quality.report import plot_quality, tabulate_domains, tabulate_quality
from benchmark.quality.running import measure_running

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
    """Measure into the record, print the tables, write the plot."""
    parser = Parser("benchmark.quality", __doc__)
    default = f"vanilla is always the baseline (default: {' '.join(POLICIES)})"
    parser.add_argument("policies", nargs="*", type=policy, default=POLICIES, help=f"{PLAN_SPELLING}; {default}")
    add_decoding(parser)
    parser.add_argument("--url", help="of a running server, in place of a decode here: see docs/tune.md for its flags")
    parser.add_argument("--api-key", help="the server's admin or API key")
    parser.add_record(BUILD / "quality")
    args = parser.parse_args(argv)
    decoding = read_decoding(args)
    if args.url is not None:
        measure_running(args.url, args.api_key, decoding, args.policies).show()
        return
    record = parser.open_record("quality", args, argv)
    missing = [text for text in (BASELINE, *args.policies) if text not in record]
    for text, figures in policy_quality(decoding, missing) if missing else ():
        record.add(text, **figures)
    tabulate_quality(record.points).show()
    tabulate_domains(record.points).show()
    title = f"What fewer experts cost: {decoding.model.name}, {decoding.layout} a step, held-out text"
    plot_quality(args.out / "quality.png", record.points, title)
    print(f"Record: {record.path}, plot: {args.out / 'quality.png'}")


if __name__ == "__main__":
    with one_line_errors("quality"):
        main()
