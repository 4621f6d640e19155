"""What is wrong with the documents, one line each: `python -m docs.check`, a part of the lint."""

import sys

from docs.documents import ROOT, list_commands, list_documents, list_links, list_paths
from docs.kinds import Ask, Elsewhere, Run, Same, Serve
from docs.runs import RUNS

PACKAGE = ROOT / "python" / "sglang_xshare"


def check_runs() -> list[str]:
    """Commands that the table of runs lacks; entries of it that no document shows, or that name what is not there."""
    shown = {command.text: command.document for command in list_commands()}
    problems = [
        f"{document}: `{text}`: no test runs it; test/docs/runs.py says how"
        for text, document in shown.items()
        if text not in RUNS
    ]
    problems += [f"test/docs/runs.py: `{text}`: no document shows it" for text in RUNS if text not in shown]
    for text, run in RUNS.items():
        if isinstance(run, Elsewhere):
            problems += [f"test/docs/runs.py: `{text}`: {reason}" for reason in check_elsewhere(text, run)]
        if isinstance(run, Same) and not isinstance(RUNS.get(run.target), Run):
            problems.append(f"test/docs/runs.py: `{text}`: `{run.target}` is not run")
        if isinstance(run, Ask) and not isinstance(RUNS.get(run.server), Serve):
            problems.append(f"test/docs/runs.py: `{text}`: `{run.server}` serves nothing")
    return problems


def check_elsewhere(text: str, run: Elsewhere) -> list[str]:
    """Why that file cannot be what runs the command."""
    file = (ROOT / run.where).resolve()
    if not file.is_relative_to(ROOT / "test") or not file.is_file():
        return [f"{run.where} is no file below test/"]
    return [] if text in file.read_text() else [f"{run.where} does not name it"]


def check_places() -> list[str]:
    """Links and paths of the documents that lead nowhere; a path may be the package's."""
    problems = []
    for document in list_documents():
        name = document.relative_to(ROOT)
        problems += [
            f"{name}: link to {target}: not there"
            for target in list_links(document)
            if not (document.parent / target).exists()
        ]
        problems += [
            f"{name}: `{path}`: not there"
            for path in list_paths(document)
            if not any((folder / path).exists() for folder in (ROOT, PACKAGE, document.parent))
        ]
    return problems


def check_folders() -> list[str]:
    """Folders with code or pages that docs/architecture.md has no line for."""
    made = "build", "dist"
    top = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in made and path.name[0] != "."]
    package = [init.parent for init in PACKAGE.rglob("__init__.py")]
    # The package's link to the queue, and folders that hold nothing but python/sglang_xshare.
    folders = sorted(str(path.relative_to(ROOT)) for path in [*top, *package] if path.name != "python")
    text = (ROOT / "docs" / "architecture.md").read_text()
    return [f"docs/architecture.md: no line for `{folder}`" for folder in folders if f"| `{folder}` |" not in text]


def main() -> None:
    """Print what is wrong; the exit code is 1 then."""
    if problems := [*check_runs(), *check_places(), *check_folders()]:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
