"""One stage of the run on a GPU, or the table of what all of them left: `scripts/gpu.sh` calls it."""

import argparse
import signal
import sys
from importlib import import_module
from pathlib import Path

from benchmark.common.server import has_gpu, one_line_errors
from benchmark.gpu.record import Record
from benchmark.gpu.table import STAGES, show_table
from benchmark.gpu.tune import POLICY, write_configs

NO_GPU = "gpu: no NVIDIA GPU answers here; nothing was measured"


def main() -> int:
    """Run the stage, continuing its record; returns 2 without a GPU. The table needs none."""
    args = _parse_args()
    if args.policy is not None and args.stage != "tune":
        raise ValueError(f"--policy {args.policy}: stage {args.stage} takes none; allowed is stage tune")
    if args.stage == "table":
        show_table(args.out)
        write_configs(args.out)
        return 0
    if not has_gpu():
        print(NO_GPU, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # servers are stopped on the way out
    record = Record(args.out, args.stage, sys.argv)
    options = {} if args.policy is None else {"policy": args.policy}
    import_module(f"benchmark.gpu.{args.stage}").measure(record, args.models, **options)
    return 0


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark.gpu", description=__doc__)
    parser.add_argument("stage", choices=[*STAGES, "table"])
    parser.add_argument("models", nargs="*", help="only these models, in stages that measure several (default: all)")
    parser.add_argument("--policy", help=f"what stage tune tunes for, such as {POLICY} (the default)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    return parser.parse_args()


if __name__ == "__main__":
    with one_line_errors("gpu"):
        sys.exit(main())
