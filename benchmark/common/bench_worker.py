"""Upstream's bench_serving, imported once and forked for every run: importing it takes longer than most runs do.

Each line of the input is a JSON list of arguments. The worker runs the unmodified module as `python -m
sglang.benchmark.serving` does, with its output on stderr, and writes its exit status as a line.
"""

import importlib
import json
import os
import runpy
import sys

from benchmark.common.server import die_with_parent

MODULE = "sglang.benchmark.serving"
"""Upstream has announced the removal of the older name, `sglang.bench_serving`."""


def main() -> None:
    """Serve runs until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    importlib.import_module(MODULE)  # and every module that it imports
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            die_with_parent()
            sys.argv = [MODULE, *json.loads(line)]
            runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
            sys.stdout.flush()
            os._exit(0)  # tearing down all that was imported takes seconds
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, file=answers, flush=True)


if __name__ == "__main__":
    main()
