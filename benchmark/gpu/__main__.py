"""Run all GPU experiments or a single one, or print the table of their records. `scripts/gpu.sh` calls this program."""

import sys
from importlib import import_module
from pathlib import Path

try:
    from benchmark.common.command import Parser, one_line_errors, positive
    from benchmark.common.record import Record
    from benchmark.common.server import has_gpu
    from benchmark.gpu import run
    from benchmark.gpu.checks import choose_parts
    from benchmark.gpu.table import EXPERIMENTS, show_table
except ModuleNotFoundError as error:
    sys.exit(f"gpu: {error}; `make gpu-bundle` packs what a machine without a package index lacks")

NO_GPU = "gpu: no NVIDIA GPU answers here; nothing was measured"


def main() -> int:
    """Run the experiments and continue existing records.

    Return 0 for success, 1 if a task failed, and 2 if there is no GPU. The table needs no GPU.
    """
    parser = Parser("benchmark.gpu", __doc__)
    parser.add_argument("what", choices=["run", *EXPERIMENTS, "table"])
    parser.add_argument("parts", nargs="*", help="only these parts of the experiment; of run: EXPERIMENT [PART...]")
    parser.add_argument("--policy", help="the policy that experiment tune tunes for (default: xshare)")
    parser.add_argument("--limit", type=positive, metavar="SECONDS", help="of the whole run (default: no limit)")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    args = parser.parse_args()
    if args.policy is not None and args.what not in ("run", "tune"):
        raise ValueError(f"--policy must be given for experiment tune alone (got {args.policy} for {args.what})")
    if args.what == "table":
        show_table(args.out)
        for module, function in (("tune", "write_configs"), ("shapes", "write_recorded")):
            getattr(import_module(f"benchmark.gpu.{module}"), function)(args.out)
        return 0
    if not has_gpu():
        print(NO_GPU, file=sys.stderr)
        return 2
    command = [*parser.prog.split(), *sys.argv[1:]]
    if args.what == "run":
        tasks = [run.Task(args.parts[0], tuple(args.parts[1:]))] if args.parts else run.TASKS
        return 0 if run.run(args.out, command, tasks, args.limit, args.policy) else 1
    experiment = import_module(f"benchmark.gpu.{args.what}")
    parts = choose_parts(args.what, args.parts, experiment.PARTS)
    options = {} if args.policy is None else {"policy": args.policy}
    if reason := experiment.measure(Record(args.out, args.what, command), parts, **options):
        raise RuntimeError(reason)
    return 0


if __name__ == "__main__":
    with one_line_errors("gpu"):
        sys.exit(main())
