"""One experiment of the run on a GPU, or the table of what all of them left: `scripts/gpu.sh` calls it."""

import sys
from importlib import import_module
from pathlib import Path

from benchmark.common.command import Parser, one_line_errors
from benchmark.common.record import Record
from benchmark.common.server import has_gpu
from benchmark.gpu.table import EXPERIMENTS, show_table
from benchmark.gpu.tune import POLICY, write_configs

NO_GPU = "gpu: no NVIDIA GPU answers here; nothing was measured"


def main() -> int:
    """Run the experiment, continuing its record; returns 2 without a GPU. The table needs none."""
    parser = Parser("benchmark.gpu", __doc__)
    parser.add_argument("experiment", choices=[*EXPERIMENTS, "table"])
    parser.add_argument("models", nargs="*", help="only these models, in experiments that measure several")
    parser.add_argument("--policy", help=f"what experiment tune tunes for, such as {POLICY} (the default)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    args = parser.parse_args()
    if args.policy is not None and args.experiment != "tune":
        raise ValueError(f"--policy {args.policy}: experiment {args.experiment} takes none; allowed is experiment tune")
    if args.experiment == "table":
        show_table(args.out)
        write_configs(args.out)
        return 0
    if not has_gpu():
        print(NO_GPU, file=sys.stderr)
        return 2
    record = Record(args.out, args.experiment, [*parser.prog.split(), *sys.argv[1:]])
    options = {} if args.policy is None else {"policy": args.policy}
    import_module(f"benchmark.gpu.{args.experiment}").measure(record, args.models, **options)
    return 0


if __name__ == "__main__":
    with one_line_errors("gpu"):
        sys.exit(main())
