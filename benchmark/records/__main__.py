"""Measure all that a CPU can, from a clean checkout, and write the pages' tables: `python -m benchmark.records`.

A record goes to its folder when it is whole; what is interrupted goes on from its last point, as long as the source
stays as it is. What is recorded of this source already is skipped.
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
from benchmark.records.pages import check_tables, list_pages, write_tables

UNFINISHED = BUILD / "records"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, then write the tables; or one of both alone."""
    parser = Parser("benchmark.records", __doc__)
    names = f"only these of {', '.join(EXPERIMENTS)}"
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", default=tuple(EXPERIMENTS), help=names)
    parser.add_argument("--tables", action="store_true", help="write the pages' tables and measure nothing")
    parser.add_argument("--check", action="store_true", help="only say which tables are not what their records say")
    parser.add_argument("--dirty", action="store_true", help="measure although the source differs from its commit")
    parser.add_argument("--small", action="store_true", help="at the smallest size, to try it; needs --out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the records; only the default has pages")
    args = parser.parse_args(argv)
    for name in args.experiments:
        if name not in EXPERIMENTS:
            parser.error(f"experiment {name!r}: allowed are {', '.join(EXPERIMENTS)}")
    if args.small and args.out == RESULTS:
        parser.error("--small: no figures for the pages; allowed with another --out")
    if not (args.check or args.tables):
        measure([EXPERIMENTS[name] for name in args.experiments], args.out, args.small, args.dirty)
    if args.out == RESULTS:
        problems = (check_tables if args.check else write_tables)(list_pages(), RESULTS)
        if problems:
            sys.exit("\n".join(problem.replace(f"{ROOT}/", "") for problem in problems))


def measure(experiments: Sequence[Experiment], results: Path, small: bool = False, dirty: bool = False) -> None:
    """Measure what the results lack. Raises ValueError for a source that differs from its commit, unless `dirty`."""
    began = time.monotonic()
    for number, one in enumerate(experiments, 1):
        changes = list_changes()
        if changes and not dirty:
            more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
            raise ValueError(f"{changes[0]}{more}: not as committed; allowed is a clean checkout, or --dirty")
        told = f"[{number}/{len(experiments)}] {one.name}"
        if is_recorded(one, results):
            print(f"{told}: recorded of this source already", flush=True)
            continue
        if one.model and not small and not one.model.is_dir():
            print(
                f"{told}: passed over; python -m training.train_moe --model {one.trained} makes its model", flush=True
            )
            continue
        minutes = (time.monotonic() - began) / 60
        print(f"{told}: about {one.minutes} min at full size; {minutes:.0f} min so far", flush=True)
        _measure(one, results, small, resume=not changes)


def is_recorded(experiment: Experiment, results: Path) -> bool:
    """Whether the results hold a record that this source has measured."""
    path = experiment.path(results)
    if not path.exists():
        return False
    commits = {session["commit"] for session in read_record(path, experiment.kind)["sessions"]}
    return all(commit is not None and is_unchanged_since(commit) for commit in commits)


def _measure(experiment: Experiment, results: Path, small: bool, resume: bool) -> None:
    """Run it, and move what it leaves when it has ended well."""
    unfinished = _locate_unfinished(experiment, "small" if small else "full")
    arguments = experiment.small if small else experiment.arguments
    command = [sys.executable, "-m", experiment.module, *arguments.split(), "--out", str(unfinished)]
    run = subprocess.run([*command, *(["--resume"] if resume else [])], cwd=ROOT, preexec_fn=die_with_parent)
    if run.returncode != 0:
        raise RuntimeError(f"{experiment.name}: ended with status {run.returncode}; its last line says why")
    folder = experiment.path(results).parent
    folder.mkdir(parents=True, exist_ok=True)
    for name in (f"{experiment.kind}.json", *experiment.plots):
        shutil.move(unfinished / name, folder / name)


def _locate_unfinished(experiment: Experiment, size: str) -> Path:
    """Where it goes on: with what this source has begun at whichever commit, the newest first; else a new folder."""
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
