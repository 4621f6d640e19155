"""A report of the source changes since each record was measured."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from benchmark.common.record import last_session, read_record
from benchmark.common.source import DIRTY, count_changes, has_history
from benchmark.records.experiments import EXPERIMENTS, SERVED_BY

LISTED = 4
"""The maximum number of folders that a line names."""


def list_stale(results: Path) -> Iterator[str]:
    """Yield lines that describe outdated records.

    One line names all experiments without a record. Then outdated records of the same commit with the same changes
    share a line. If the checkout has no git history, a single line reports that changes are unknown.
    """
    missing = [name for name, one in EXPERIMENTS.items() if not one.path(results).exists()]
    if missing:
        yield f"{', '.join(missing)}: never recorded"
    if not has_history():
        yield "records: this checkout has no history, so changes since each record are unknown"
        return
    lines: dict[str, list[str]] = {}
    for name, path, paths in _list_records(results):
        commit = (last_session(read_record(path))["commit"] or "").removesuffix(DIRTY)
        found = count_changes(commit, paths) if commit else None
        if found is None:
            change = f"its commit {commit or 'is unknown'} is not in this checkout"
        else:
            count, files = found
            folders = Counter(str(PurePosixPath(*PurePosixPath(file).parts[:3])) for file in files).most_common(LISTED)
            named = ", ".join(f"{folder} ({number})" for folder, number in folders)
            change = f"of {commit}; {count} commits since, {len(files)} files differ: {named}" if files else ""
        if change:
            lines.setdefault(change, []).append(name)
    for change, names in lines.items():
        yield f"{', '.join(names)}: {change}"


def _list_records(results: Path) -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    """Yield the name of each existing record, its path, and the source paths that can change its results."""
    for name, one in EXPERIMENTS.items():
        if one.path(results).exists():
            yield name, one.path(results), one.depends
    for path in sorted(results.glob("20*/*.json")):  # runs on a GPU
        yield f"{path.parent.name}/{path.stem}", path, (*SERVED_BY, "benchmark/gpu")
