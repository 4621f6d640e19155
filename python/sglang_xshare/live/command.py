"""The subcommand `policy`: print a running server's expert policy, or switch to another policy."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from typing import Any

from rich.table import Table

from ..console import open_console
from ..files import read_json
from ..policies.keys import as_json
from ..policies.plan import AUTO
from ..policies.spelling import SPELLING, parse_policy
from ..stage.record.interval import Interval, format_log
from .client import Client, add_server, find_keys


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommands `policy get` and `policy set`."""
    description = "print or switch the expert policy of a running server"
    parser = subparsers.add_parser("policy", help=description, description=description)
    actions = parser.add_subparsers(required=True, metavar="get|set")
    for name, help in (("get", "the active policy, its limits and counters"), ("set", "switch between two steps")):
        action = actions.add_parser(name, help=help, description=help)
        add_server(action, "--expert-policy", admin=name == "set")
        if name == "set":
            action.add_argument("policy", nargs="?", metavar="POLICY", help=SPELLING)
            action.add_argument(
                "--exact-by-default",
                action="store_true",
                help='requests are exact unless they set "expert_policy": "shared" in their custom_params',
            )
            action.add_argument(
                "--config", metavar="FILE", help="a JSON file: the keys, beside POLICY or with policy in it"
            )
        action.add_argument("--json", action="store_true", help="the server's answer as it is")
        action.set_defaults(run=_run, action=name, name=f"policy {name}")


def _run(arguments: argparse.Namespace) -> int:
    body = read_policy(arguments) if arguments.action == "set" else None
    client = Client(arguments.url, *find_keys(arguments))
    answer = client.get_policy() if body is None else client.set_policy(body)
    if arguments.json:
        print(json.dumps(answer, indent=2))
    else:
        print_answer(answer)
    for warning in answer.get("warnings", []):
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def read_policy(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the body of a POST for these arguments. Raises ValueError if the policy or the file is invalid."""
    body: dict[str, Any] = {}
    if arguments.policy:
        name, keys = parse_policy(arguments.policy)
        body = {"policy": name, **keys}
    config = read_json("--config", arguments.config) if arguments.config else {}
    by_default = {"exact": {"default": True}} if arguments.exact_by_default else {}
    for part in (config, by_default):
        for key in body.keys() & part.keys():
            both = f"{as_json(body[key])} and {as_json(part[key])}"
            raise ValueError(f"{key} = {both}: must be given once")
        body |= part
    if "policy" not in body:
        raise ValueError("policy must be given, such as xshare:k0=1,add=6, or as a key of --config")
    return body


def print_answer(answer: dict[str, Any]) -> None:
    """Print the active policy as a table of its keys, then the counts since the last switch."""
    console = open_console()
    table = Table("key", "value", "")
    # A word for `mass`, such as "fast", stands for overrides by number of rows. So a user who gives a word also gives
    # `overrides`.
    overridden = {key for override in answer["in_force"].get("overrides", ()) for key in override}
    given = {*answer, "overrides"} if answer.keys() & overridden else {*answer}
    for key, value in answer["in_force"].items():
        if key == "overrides" and not value:
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        estimate = answer.get("estimated_acceptance")  # None without drafts
        if (key, value) == ("acceptance", AUTO) and estimate is not None:
            text += f", now {estimate:.3f}"
        table.add_row(key, text, "" if key in given else "default")
    console.print(table)
    if "since_switch" not in answer:  # the server has no policy, and only chooses the draft depth
        return
    trial = ", a trial of a search, which will restore another policy" if answer.get("trial") else ""
    plan = f"plan {answer.get('plan_hash', '-')}{trial}"
    console.print(f"{plan}; {describe_since(answer)}")
    limits = answer["limits"]
    graphs = f"; graphs that select: {limits['selecting_rows'] or 'none'}" if limits["captured_rows"] else ""
    console.print(f"router rows of a step: {limits['batches']}{graphs}")


def describe_since(answer: dict[str, Any]) -> str:
    """Return the counts since the last switch, in the format of the decode log."""
    since = {one.name: answer["since_switch"].get(one.name, one.default) for one in fields(Interval)}
    return f"switches: {answer['switches']}; since the last: {format_log(Interval(**since)).removeprefix(', ')}"
