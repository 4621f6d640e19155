"""What stops servers with given arguments, on a release, all asked in one process; and in which words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from served.release import CPU, make_env

FILE = Path(__file__).with_name("refusals.json")
LINES: dict[str, dict[str, str]] = json.loads(FILE.read_text())
"""The whole line of every refusal, by list and case; `test_refusals.py` writes them."""
Answer = dict[str, object] | None
"""As `resolve_arguments.py` prints it; None where the server would start."""


def attempt(tree: Path, model: Path, asked: Sequence[Sequence[str]]) -> list[Answer]:
    """The answer to each list of arguments."""
    lines = [["--model-path", str(model), *CPU, *arguments] for arguments in asked]
    script = Path(__file__).with_name("resolve_arguments.py")
    done = subprocess.run(
        [sys.executable, script], input=json.dumps(lines), env=make_env(tree), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "null"))]
    assert len(answers) == len(lines)
    return answers


def line_of(answer: Answer) -> str:
    """What a refused server says."""
    assert answer is not None
    return str(answer["says"])
