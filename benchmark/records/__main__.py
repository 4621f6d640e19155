"""Run all benchmarks that need only a CPU, and write the tables of the pages: `python -m benchmark.records`.

The checkout must be clean. A record moves to its folder when it is complete. An interrupted run continues from its last
point if the source code is unchanged. Experiments that already have a record of this source are skipped. `--check`
reports tables and pictures that differ from their records as errors. It also lists experiments without a record and
files that have changed since each record, but these are not errors.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmark.common.command import Parser, run_main
from benchmark.common.paths import BUILD, RESULTS, ROOT
from benchmark.common.record import read_record
from benchmark.common.server import die_with_parent
from benchmark.common.source import describe_commit, is_unchanged_since, list_changes
from benchmark.records.experiments import EXPERIMENTS, Experiment
from benchmark.records.history import list_stale
from benchmark.records.pages import check_tables, list_pages, write_tables
from benchmark.records.pictures import check_pictures, write_pictures

UNFINISHED = BUILD / "records"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the missing experiments, and write the tables and pictures. `--tables` and `--check` run no experiment."""
    parser = Parser("benchmark.records", __doc__)
    names = f"only these of {', '.join(EXPERIMENTS)}"
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", default=tuple(EXPERIMENTS), help=names)
    parser.add_argument(
        "--tables", action="store_true", help="write the pages' tables and pictures, and measure nothing"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only name tables and pictures that differ from their records, and records of older sources",
    )
    parser.add_argument("--dirty", action="store_true", help="measure although the source differs from its commit")
    parser.add_argument("--small", action="store_true", help="at the smallest size, for a try; needs --out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the records; only the default has pages")
    args = parser.parse_args(argv)
    for name in args.experiments:
        if name not in EXPERIMENTS:
            parser.error(f"experiment must be one of {', '.join(EXPERIMENTS)} (got {name!r})")
    if args.small and args.out == RESULTS:
        parser.error("--small must be used with another --out, because pages show no figures of this size")
    if not (args.check or args.tables):
        measure([EXPERIMENTS[name] for name in args.experiments], args.out, args.small, args.dirty)
    if args.out == RESULTS:
        if args.check:
            problems = check_tables(list_pages(), RESULTS) + check_pictures(RESULTS)
            print(*list_stale(RESULTS), sep="\n")
        else:
            problems = write_tables(list_pages(), RESULTS) + write_pictures(RESULTS)
        if problems:
            sys.exit("\n".join(problem.replace(f"{ROOT}/", "") for problem in problems))


def measure(experiments: Sequence[Experiment], results: Path, small: bool = False, dirty: bool = False) -> None:
    """Run the experiments whose records are missing.

    Raises ValueError if the source differs from its commit and `dirty` is false.
    """
    began = time.monotonic()
    for number, one in enumerate(experiments, 1):
        changes = list_changes()
        if changes and not dirty:
            more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
            raise ValueError(f"the checkout must be clean, or --dirty given (changed: {changes[0]}{more})")
        head = f"[{number}/{len(experiments)}] {one.name}"
        if is_recorded(one, results):
            print(f"{head}: skipped; this source has a record", flush=True)
            continue
        if one.model and not small and not one.model.is_dir():
            print(f"{head}: skipped; python -m training.train_moe --model {one.trained} makes its model", flush=True)
            continue
        minutes = (time.monotonic() - began) / 60
        print(f"{head}: about {one.minutes} min at full size; {minutes:.0f} min so far", flush=True)
        _measure(one, results, small, resume=not changes)


def is_recorded(experiment: Experiment, results: Path) -> bool:
    """Return whether there is a record that was measured with the current source."""
    path = experiment.path(results)
    if not path.exists():
        return False
    commits = {session["commit"] for session in read_record(path, experiment.kind)["sessions"]}
    return all(commit is not None and is_unchanged_since(commit) for commit in commits)


def _measure(experiment: Experiment, results: Path, small: bool, resume: bool) -> None:
    """Run an experiment. After success, move its record and plots to the results folder."""
    unfinished = _locate_unfinished(experiment, "small" if small else "full")
    arguments = experiment.small if small else experiment.arguments
    command = [sys.executable, "-m", experiment.module, *arguments.split(), "--out", str(unfinished)]
    run = subprocess.run([*command, *(["--resume"] if resume else [])], cwd=ROOT, preexec_fn=die_with_parent)
    if run.returncode != 0:
        raise RuntimeError(f"{experiment.name}: ended with status {run.returncode}; its last line has the reason")
    path = experiment.path(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in (path.name, *experiment.plots):
        shutil.move(unfinished / name, path.parent / name)


def _locate_unfinished(experiment: Experiment, size: str) -> Path:
    """Return the folder of the newest unfinished record of the current source, or else a new folder."""
    begun = [
        record
        for record in UNFINISHED.glob(f"*/{size}/{experiment.name}/{experiment.kind}.json")
        if is_unchanged_since(record.parts[-4])
    ]
    if begun:
        return max(begun, key=lambda record: record.stat().st_mtime).parent
    return UNFINISHED / (describe_commit() or "unknown") / size / experiment.name


if __name__ == "__main__":
    run_main("records", main)
