"""What policies cost in quality: `python -m benchmark.quality vanilla xshare:k0=1,add=24 oea:k0=3`."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from benchmark.common.paths import ROOT
from benchmark.common.variant import SPELLING
from benchmark.quality.compare import policy_quality
from benchmark.quality.report import print_tables, write_plot, write_record
from benchmark.quality.workload import add_workload_flags, read_workload

OUT = ROOT / "build" / "quality"
POLICIES = (
    *(f"pruned:k0={k0}" for k0 in (6, 5, 4, 3)),
    *(f"oea:k0={k0}" for k0 in (5, 4, 3, 2)),
    *(f"xshare:k0=1,add={add}" for add in (24, 16, 12, 8)),
    *(f"xshare:k0=1,add={add},utility=full" for add in (16, 12, 8)),
    *(f"lynx-lat:retain={retain}" for retain in (24, 20, 16)),
    *(f"moe-spec:budget={budget}" for budget in (24, 20, 16)),
)


def main() -> None:
    """Measure, print the table, write the record and the plot."""
    args = _parse_args()
    try:
        workload = read_workload(args)
        records = policy_quality(workload, args.policies or POLICIES)
    except ValueError as error:
        sys.exit(f"error: {error}")
    step = f"{workload.layout} a step"
    title = f"{args.model.name}, {step}; cross-entropy in millinats a token above vanilla's, ± standard error"
    print_tables(records, title)
    write_record(args.out / "quality.json", sys.argv, workload=asdict(workload), policies=records)
    write_plot(args.out / "quality.png", records, f"{args.model.name}, {step}")
    print(f"record: {args.out / 'quality.json'}, plot: {args.out / 'quality.png'}")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark.quality", description=__doc__)
    parser.add_argument("policies", nargs="*", help=f"{SPELLING} (default: {' '.join(POLICIES)})")
    add_workload_flags(parser)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
