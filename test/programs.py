"""Scripts in folders of their own: stand-ins for the programs that they call, runs, refusals."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.common.paths import ROOT

OF_AN_OUTER_MAKE = dict.fromkeys(("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"))
"""Variables to remove, so that a make under `make test` does not inherit the flags of the outer make."""


def write_program(path: Path, text: str) -> None:
    """A shell script, with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def copy_files(folder: Path, *names: str) -> None:
    """Copy files of the checkout to the same places below a folder."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)


def run_program(
    *command: object, env: Mapping[str, str | None] | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command for its status and all that it prints. `env` changes the environment; None removes a variable."""
    environment = {name: value for name, value in (os.environ | (env or {})).items() if value is not None}
    return subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, **more)


def read_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one line of a refusal: status 1, and nothing else printed."""
    assert (done.returncode, done.stdout, done.stderr.count("\n"), done.stderr[-1:]) == (1, "", 1, "\n")
    return done.stderr.strip()
