"""Run in a process of its own, on one release: `sglang-xshare check`, many times.

Reads a JSON list of argument lists from stdin; prints, for each, a JSON line: exit code, and what went to stdout and
stderr.
"""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

from sglang_xshare.cli import main


def run(arguments: list[str]) -> dict[str, object]:
    """What the command says."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["check", *arguments])
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    for arguments in json.load(sys.stdin):
        print(json.dumps(run(arguments)), flush=True)
