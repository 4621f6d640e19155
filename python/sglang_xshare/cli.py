"""The command line: `sglang-xshare patch ...`, `policies` and `check`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from . import __version__
from .check.command import add_parser as add_check_parser
from .patching.cli import add_parser as add_patch_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit code; argparse exits with 2 on a wrong command line."""
    parser = argparse.ArgumentParser(prog="sglang-xshare", description="Batch-aware expert selection for SGLang.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    add_patch_parser(subparsers)
    _add_policies_parser(subparsers)
    add_check_parser(subparsers)
    arguments, others = parser.parse_known_args(argv)
    if hasattr(arguments, "server_flags"):
        arguments.server_flags = others
    elif others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has left, as `head -1` does. Python flushes once more on its way out: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


def _add_policies_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    description = "list the expert policies: their keys, and what their papers recommend"
    parser = subparsers.add_parser("policies", help=description, description=description)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these policies (default: all)")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_run_policies)


def _run_policies(arguments: argparse.Namespace) -> int:
    from .policies import get_policy, list_policies
    from .policies.table import format_json, print_table

    try:
        policies = [get_policy(name) for name in arguments.names] or list_policies()
    except ValueError as error:
        print(f"policies: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(format_json(policies))
    else:
        print_table(policies)
    return 0
