"""What stops servers with given arguments, on a release, all asked in one process; and in which words."""

import json
from collections.abc import Sequence
from pathlib import Path

from served.release import CPU, make_env, run_script

FILE = Path(__file__).with_name("refusals.json")
LINES: dict[str, dict[str, str]] = json.loads(FILE.read_text())
"""The whole line of every refusal, by list and case; `test_refusals.py` writes them."""
Answer = dict[str, object] | None
"""As `resolve_arguments.py` prints a refusal; None where the server would start."""


def attempt(tree: Path, model: Path, asked: Sequence[Sequence[str]]) -> list[Answer]:
    """The answer to each list of arguments."""
    lines = [["--model-path", str(model), *CPU, *arguments] for arguments in asked]
    answers = run_script(Path(__file__).with_name("resolve_arguments.py"), make_env(tree), lines)
    assert len(answers) == len(lines)
    return [answer if "says" in answer else None for answer in answers]


def line_of(answer: Answer) -> str:
    """What a refused server says."""
    assert answer is not None
    return str(answer["says"])
