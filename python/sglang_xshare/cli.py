"""The command line `sglang-xshare`. Each subcommand except `policies` has its own module."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from .affinity.command import add_parser as add_calibrate
from .check.command import add_parser as add_check
from .live.client import PolicyError
from .live.command import add_parser as add_policy
from .live.top import add_parser as add_top
from .parser import Parser, whole
from .patching.cli import add_parser as add_patch
from .patching.tree import PatchError
from .policies.spelling import SPELLING
from .tune.command import add_parser as add_tune
from .version import __version__


def make_parser() -> argparse.ArgumentParser:
    """Return the command-line parser with all subcommands."""
    parser: argparse.ArgumentParser = Parser(
        prog="sglang-xshare", description="Batch-aware expert selection for SGLang."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers: Any = parser.add_subparsers(metavar="COMMAND")
    for add in (add_patch, _add_policies, add_policy, add_top, add_tune, add_check, add_calibrate):
        add(subparsers)
    parser.set_defaults(run=_require_command, name=parser.prog, commands=list(subparsers.choices))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. The code is 130 after Ctrl-C and 1 after an error."""
    if sys.stdout is None:  # the shell's >&- has closed stdout
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - stays open until Python ends
    parser = make_parser()
    arguments, others = parser.parse_known_args(argv)
    if hasattr(arguments, "server_flags"):
        arguments.server_flags = others
    elif others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The program that reads the output, such as `head -1`, has ended. Python's last flush at exit must go to
        # /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        line = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except (ValueError, PolicyError, PatchError) as error:
        line = str(error)
    print(f"{arguments.name}: {' '.join(line.split())}", file=sys.stderr)
    return 1


def _require_command(arguments: argparse.Namespace) -> int:
    raise ValueError(f"a command must be given, one of {', '.join(arguments.commands)}")


def _add_policies(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    description = "list the expert policies: their keys, and their papers' recommendations"
    parser = subparsers.add_parser("policies", help=description, description=description)
    parser.add_argument("policies", nargs="*", metavar="POLICY", help="only these (default: all)")
    resolved = f"show the plan of one policy instead, with every default resolved: {SPELLING}"
    parser.add_argument("--show", metavar="POLICY", help=resolved)
    verified = "with --show: for a server that verifies N draft tokens a request"
    parser.add_argument("--speculative-num-draft-tokens", type=whole(), metavar="N", help=verified)
    parser.set_defaults(run=_run_policies, name="policies")


def _run_policies(arguments: argparse.Namespace) -> int:
    from .policies import get_policy, list_policies
    from .policies.table import print_table

    tokens = arguments.speculative_num_draft_tokens
    if arguments.show is not None:
        if arguments.policies:
            given = " ".join([arguments.show, *arguments.policies])
            raise ValueError(f"--show {given}: must be one policy, with its keys after a colon")
        return _show(arguments.show, speculative=tokens is not None)
    if tokens:
        raise ValueError(f"--speculative-num-draft-tokens {tokens}: must be used with --show")
    print_table([get_policy(name) for name in arguments.policies] or list_policies())
    return 0


def _show(policy: str, speculative: bool) -> int:
    """Print the plan of a policy. Raises ValueError if a server would refuse the policy for every model."""
    from .compatibility.arguments import read_arguments
    from .policies.description import describe

    flags = SimpleNamespace(expert_policy=policy, speculative_algorithm="EAGLE3" if speculative else None)
    asked = read_arguments(flags, speculates="--speculative-num-draft-tokens N")
    schedule = asked.schedule if asked else None
    print(json.dumps(describe(schedule) if schedule else {"policy": "vanilla"}, indent=2))
    return 0
