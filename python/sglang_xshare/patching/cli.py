"""The subcommand `patch`, with its commands apply, revert and status."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from ..parser import path
from .engine import apply, describe, revert
from .state import Condition, survey
from .tree import PatchError, find_tree


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `patch`. In the parsed arguments, `run` is a function that returns the exit code."""
    parser = subparsers.add_parser("patch", help="apply our patches to an installed SGLang release, or revert them")
    commands = parser.add_subparsers(dest="command", required=True)
    where = "directory that contains sglang/ (default: the installed one)"
    for name, description in {
        "apply": "patch the tree; a patched tree stays unchanged",
        "revert": "give every file its own content back",
        "status": "report the tree's condition; exit code 1 if the tree needs attention",
    }.items():
        command = commands.add_parser(name, help=description, description=description)
        command.set_defaults(run=run, name=f"patch {name}")
        command.add_argument("--target", type=path, metavar="DIR", help=where)


def run(args: argparse.Namespace) -> int:
    """Run one command. Return its exit code, which is 130 after Ctrl-C.

    Raises PatchError if the command fails, even if an OSError is the reason.
    """
    before = None
    try:
        before = _find_condition(args.target)
        line = {"apply": apply, "revert": revert, "status": describe}[args.command](args.target)
    except KeyboardInterrupt:
        after = _find_condition(args.target)
        outcome = f"the tree is {after.value} now" if before and after and after is not before else "nothing changed"
        print(f"patch {args.command}: interrupted; {outcome}", file=sys.stderr)
        return 128 + signal.SIGINT
    except ImportError as error:  # in a checkout without pip install
        raise PatchError(f"{error}; pip install it") from None
    except OSError as error:  # the error of a full disk names no file
        raise PatchError(f"{error.filename or args.target or 'sglang'}: {error.strerror}") from None
    print(f"patch {args.command}: {line}")
    return 0


def _find_condition(target: Path | None) -> Condition | None:
    """Return the tree's condition, or None if the command refuses the tree."""
    try:
        return survey(find_tree(target))[0]
    except (PatchError, OSError):
        return None
