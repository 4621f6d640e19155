"""Stand-ins for programs that a script calls."""

from pathlib import Path


def write_program(path: Path, text: str) -> None:
    """A shell script, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
