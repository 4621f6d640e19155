"""Compare expert policies in the real server: `python -m benchmark.serving vanilla xshare:k0=1,add=24 oea:k0=3`."""

import argparse
import sys
from pathlib import Path

from benchmark.common.paths import BUILD, LARGE, TEXTS
from benchmark.common.rounds import Workload, compare
from benchmark.common.server import one_line_errors
from benchmark.common.variant import SPELLING, Variant, parse_variant
from benchmark.serving.report import Comparison, describe_workload, print_table, write_plot, write_record


def main() -> None:
    """Measure, print the table, write the record and the plot."""
    args = _parse_args()
    counts = {name: getattr(args, name) for name in COUNTS}
    workload = Workload(args.model, args.texts, seed=args.seed, **counts)
    comparison = Comparison(workload, compare(workload, args.policies, args.server_args))
    title = f"{workload.model.name}: {describe_workload(workload)}"
    print_table(title, [comparison])
    write_record(args.out / "serving.json", sys.argv, [comparison])
    write_plot(args.out / "serving.png", title, [comparison])
    print(f"Record: {args.out / 'serving.json'}, plot: {args.out / 'serving.png'}")


# Flag, default and help of every count of `Workload`.
COUNTS = {
    "rounds": (5, "alternating rounds"),
    "requests": (32, "requests a round and policy"),
    "concurrency": (16, "requests at a time"),
    "input_tokens": (8, "tokens a prompt"),
    "output_tokens": (32, "tokens a continuation"),
}


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark.serving", description=__doc__)
    parser.add_argument(
        "policies", nargs="+", type=_variant, help=f"{SPELLING}; the first is the baseline of the ratios"
    )
    parser.add_argument("--model", type=_folder, default=LARGE, help="checkpoint folder (default: %(default)s)")
    parser.add_argument(
        "--texts", type=_folder, default=TEXTS, help="folder of *.txt for prompts (default: %(default)s)"
    )
    for name, (default, text) in COUNTS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=_positive, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--seed", type=int, default=0, help="chooses the prompts (default: 0)")
    parser.add_argument("--out", type=Path, default=BUILD / "bench", help="folder of the results")
    parser.add_argument("--server-args", nargs=argparse.REMAINDER, default=[], help="the rest goes to every server")
    args = parser.parse_args()
    names = [variant.name for variant in args.policies]
    if len(set(names)) < len(names):
        parser.error(f"policies {' '.join(names)}: each may be given once")
    return args


def _variant(text: str) -> Variant:
    try:
        return parse_variant(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return path.resolve()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is a whole number above 0")
    return int(text)


if __name__ == "__main__":
    with one_line_errors("bench"):
        main()
