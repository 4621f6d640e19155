"""What stops servers with given arguments, on a release, all asked in one process; and in which words."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from served.release import CPU, make_env, run_script

FILE = Path(__file__).with_name("refusals.json")
LINES: dict[str, dict[str, str]] = json.loads(FILE.read_text())
"""The whole line of every refusal, by list and case; `test_refusals.py` writes them."""


def resolve(tree: Path, model: Path, asked: Sequence[Sequence[str]], is_b200: bool = False) -> list[dict[str, Any]]:
    """Return what `resolve_arguments.py` prints for each list of arguments."""
    env = make_env(tree) | {"PYTHONDONTWRITEBYTECODE": "1"}  # a pristine tree stays so
    lines = [["--model-path", str(model), *arguments] for arguments in asked]
    answers = run_script(Path(__file__).with_name("resolve_arguments.py"), env, (is_b200, lines))
    assert len(answers) == len(lines)
    return answers


def attempt(tree: Path, model: Path, asked: Sequence[Sequence[str]]) -> list[dict[str, Any] | None]:
    """Return the line that refuses each server on a CPU, and whether it is our line. None if the server would start."""
    answers = resolve(tree, model, [(*CPU, *arguments) for arguments in asked])
    return [{key: one[key] for key in ("ours", "says")} if "says" in one else None for one in answers]
