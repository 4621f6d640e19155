"""The reference page is what the code says."""

from __future__ import annotations

import subprocess
import sys

from docs.documents import ROOT


def test_the_page_is_what_its_script_writes() -> None:
    # A process of its own: the metrics that the script lists are registered once in a process.
    command = [sys.executable, "-m", "scripts.reference", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
