"""`sglang-xshare policies`: every policy with its keys, their ranges and defaults, its paper and what it recommends."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import orjson

from .registry import Policy, list_policies

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `policies`; the parsed arguments carry `run(args) -> exit code`."""
    parser = subparsers.add_parser("policies", help="list the expert policies and their keys")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these policies")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the policies asked for. An unknown name is one line on stderr and exit code 1."""
    known = {policy.name: policy for policy in list_policies()}
    for name in args.names:
        if name not in known:
            raise SystemExit(f"policies: {name}: no such policy; allowed is {', '.join(known)}")
    policies = [known[name] for name in args.names or known]
    if args.json:
        print(orjson.dumps([describe(policy) for policy in policies], option=orjson.OPT_INDENT_2).decode())
    else:
        _print_tables(policies)
    return 0


def describe(policy: Policy) -> dict[str, Any]:
    """A policy as plain data: summary, paper, phases, keys, and the settings its paper recommends."""
    return {
        "policy": policy.name,
        "summary": policy.summary,
        "paper": policy.paper,
        "phases": list(policy.phases),
        "keys": {
            name: {"allowed": key.allowed, "help": key.help}
            | ({"default": policy.defaults[name]} if name in policy.defaults else {"required": True})
            for name, key in policy.keys.items()
        },
        "recommended": [{"keys": dict(setting.keys), "result": setting.result} for setting in policy.published],
    }


def _print_tables(policies: list[Policy]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for policy in policies:
        table = Table(
            "key", "default", "allowed", "meaning", title=f"{policy.name}  {policy.paper}", title_justify="left"
        )
        for name, key in policy.keys.items():
            default = orjson.dumps(policy.defaults[name]).decode() if name in policy.defaults else "required"
            table.add_row(name, default, key.allowed, key.help)
        console.print(policy.summary)
        console.print(table if policy.keys else f"{policy.name}: no keys")
        for setting in policy.published:
            console.print(f"  {orjson.dumps(dict(setting.keys)).decode()}: {setting.result}", soft_wrap=True)
        console.print()
