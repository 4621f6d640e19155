"""`sglang-xshare patch apply|revert|status`."""

from __future__ import annotations

import argparse

from ..parser import path
from .engine import apply, describe, revert
from .tree import PatchError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `patch`; the parsed arguments carry `run(args) -> exit code`."""
    parser = subparsers.add_parser("patch", help="apply our patches to an installed SGLang release, or take them back")
    commands = parser.add_subparsers(dest="command", required=True)
    where = "directory that contains sglang/ (default: the installed one)"
    for name, description in {
        "apply": "patch the tree; a no-op where it is patched already",
        "revert": "give every file its own content back",
        "status": "say how the tree stands; exit code 1 where it needs attention",
    }.items():
        command = commands.add_parser(name, help=description, description=description)
        command.set_defaults(run=run, name=f"patch {name}")
        command.add_argument("--target", type=path, metavar="DIR", help=where)


def run(args: argparse.Namespace) -> int:
    """Run one command. Raises `PatchError`, which names the folder where a file cannot be read or written."""
    try:
        line = {"apply": apply, "revert": revert, "status": describe}[args.command](args.target)
    except ImportError as error:  # from a checkout, without pip install
        raise PatchError(f"{error}; pip install it") from None
    except OSError as error:  # one of a full disk names no file
        raise PatchError(f"{error.filename or args.target or 'sglang'}: {error.strerror}") from None
    print(f"patch {args.command}: {line}")
    return 0
