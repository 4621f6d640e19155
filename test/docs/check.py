"""What is wrong with the documents, one line each: `python -m docs.check`, a part of the lint."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from docs.documents import ROOT, Command, list_commands, list_documents, list_links, list_paths
from docs.kinds import Ask, Elsewhere, Run, Same, Serve
from docs.runs import RUNS

PACKAGE = ROOT / "python" / "sglang_xshare"


def check_runs(commands: Iterable[Command], runs: Mapping[str, object] = RUNS) -> list[str]:
    """Commands that the table of runs lacks; entries of it that no document shows, or that name what is not there."""
    commands = list(commands)
    shown = {command.text for command in commands}
    problems = [
        f"{command.document}: `{command.text}`: no test runs it; test/docs/runs.py says how"
        for command in commands
        if command.text not in runs
    ]
    problems += [f"test/docs/runs.py: `{text}`: no document shows it" for text in runs if text not in shown]
    for text, run in runs.items():
        if isinstance(run, Elsewhere):
            problems += [f"test/docs/runs.py: `{text}`: {reason}" for reason in check_elsewhere(text, run)]
        if isinstance(run, Same) and not isinstance(runs.get(run.target), Run):
            problems.append(f"test/docs/runs.py: `{text}`: `{run.target}` is not run")
        if isinstance(run, Ask) and not isinstance(runs.get(run.server), Serve):
            problems.append(f"test/docs/runs.py: `{text}`: `{run.server}` serves nothing")
    return problems


def check_elsewhere(text: str, run: Elsewhere) -> list[str]:
    """Why that file cannot be what runs the command."""
    file = (ROOT / run.where).resolve()
    if not file.is_relative_to(ROOT / "test") or not file.is_file():
        return [f"{run.where} is no file below test/"]
    return [] if text in file.read_text() else [f"{run.where} does not name it"]


def check_places(documents: Iterable[Path], root: Path = ROOT) -> list[str]:
    """Links and paths of the documents that lead nowhere; a path may be the package's."""
    problems = []
    for document in documents:
        name = document.relative_to(root)
        problems += [
            f"{name}: link to {target}: not there"
            for target in list_links(document)
            if not (document.parent / target).exists()
        ]
        problems += [
            f"{name}: `{path}`: not there"
            for path in list_paths(document)
            if not any((folder / path).exists() for folder in (root, PACKAGE, document.parent))
        ]
    return problems


def check_folders(page: Path, folders: Iterable[str]) -> list[str]:
    """Folders that the page of folders has no line for."""
    text = page.read_text()
    return [f"{page.relative_to(ROOT)}: no line for `{folder}`" for folder in folders if f"| `{folder}` |" not in text]


def list_folders() -> list[str]:
    """The folders of the checkout that hold code or pages, and those of the package."""
    top = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in ("build", "dist")]
    top = [path for path in top if not path.name.startswith(".")]
    package = [init.parent for init in PACKAGE.rglob("__init__.py")]
    # The package's link to the queue, and folders that hold nothing but python/sglang_xshare.
    return sorted(str(path.relative_to(ROOT)) for path in [*top, *package] if path.name != "python")


def main() -> None:
    """Print what is wrong; the exit code is 1 then."""
    problems = check_runs(list_commands())
    problems += check_places(list_documents())
    problems += check_folders(ROOT / "docs" / "architecture.md", list_folders())
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
