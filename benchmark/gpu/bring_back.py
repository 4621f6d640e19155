"""A folder of results as few flat files, for a machine that gives back no others: `bring_back RESULTS OUT`.

The records and summary.md lie there as they are; `more.tar.xz` holds what is deeper: the record of tune with its
configurations, and the ends of the logs of steps that failed.
"""

import shutil
import sys
import tarfile
from pathlib import Path

from benchmark.common.paths import LOGS

MOST_FILES, MOST_BYTES = 8, 16 << 20
FLAT = ("run.json", "selection.json", "layer.json", "server.json", "eagle3.json", "replay.json", "summary.md")
MORE = "more.tar.xz"
LOG_BYTES, STEP_LOGS = 100_000, 8  # of the end of a log; the newest of a step


def bring_back(results: Path, out: Path) -> list[Path]:
    """Copy and pack. Returns the files; what would be larger than `MOST_BYTES` goes without the logs, or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    flat = [results / name for name in FLAT if _fits(results / name)]
    packed = sorted(path for path in results.rglob("*") if path.is_file() and path not in flat)
    for path in flat:
        shutil.copyfile(path, out / path.name)
    if packed:
        logs = results / "logs"
        for chosen in (packed, [path for path in packed if logs not in path.parents]):
            with tarfile.open(out / MORE, "w:xz") as archive:
                for path in chosen:
                    archive.add(path, path.relative_to(results))
            if _fits(out / MORE):
                break
        else:
            (out / MORE).unlink()
    return sorted(out.iterdir())


def unpack(results: Path) -> None:
    """Unpack the archive where a folder of brought files has one."""
    if (results / MORE).exists():
        with tarfile.open(results / MORE) as archive:
            archive.extractall(results, filter="data")
        (results / MORE).unlink()


def keep_logs(results: Path, step: str, since: float) -> None:
    """Keep the ends of the logs that were written since that time (of `time.time`), in place of the step's earlier."""
    written = [path for path in LOGS.glob("*.log") if path.stat().st_mtime >= since]
    newest = sorted(written, key=lambda path: path.stat().st_mtime)[-STEP_LOGS:]
    folder = results / "logs" / step.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)
    for path in newest:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as log:
            log.seek(max(path.stat().st_size - LOG_BYTES, 0))
            (folder / path.name).write_bytes(log.read())


def _fits(path: Path) -> bool:
    return path.exists() and path.stat().st_size <= MOST_BYTES


if __name__ == "__main__":
    for brought in bring_back(Path(sys.argv[1]), Path(sys.argv[2])):
        print(f"gpu: {brought}, {brought.stat().st_size >> 10} KiB")
