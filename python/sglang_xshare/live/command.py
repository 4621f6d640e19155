"""The subcommand `policy`: what a running server's expert policy is, and another one in its place."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.table import Table

from ..console import open_console
from ..files import read_json
from ..policies.keys import as_json
from ..policies.plan import AUTO
from ..policies.spelling import SPELLING, parse_policy
from .client import Client, add_server, find_keys


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `policy get` and `policy set`."""
    description = "tell or switch the expert policy of a running server"
    parser = subparsers.add_parser("policy", help=description, description=description)
    actions = parser.add_subparsers(required=True, metavar="get|set")
    for name, help in (("get", "the policy in force, its limits and counters"), ("set", "switch it between two steps")):
        action = actions.add_parser(name, help=help, description=help)
        add_server(action, "--expert-policy", admin=name == "set")
        if name == "set":
            action.add_argument("policy", nargs="?", metavar="POLICY", help=SPELLING)
            action.add_argument(
                "--exact-by-default",
                action="store_true",
                help='requests are exact unless they say "expert_policy": "shared" in their custom_params',
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
    """The body of a POST. Raises ValueError for a policy or a file that could not be sent."""
    name, keys = parse_policy(arguments.policy) if arguments.policy else (None, {})
    given = read_json("--config", arguments.config) if arguments.config else {}
    if name is None and "policy" not in given:
        raise ValueError("no policy; allowed is one such as xshare:k0=1,add=6, or --config with a key policy")
    if name is not None and "policy" in given:
        other = f"policy = {as_json(given['policy'])} in {arguments.config}"
        raise ValueError(f"{name} and {other}; allowed is one of the two")
    for key in keys.keys() & given.keys():
        both = f"{as_json(keys[key])} and {as_json(given[key])}"
        raise ValueError(f"{key} = {both}: allowed is one of the two for a key")
    body = ({} if name is None else {"policy": name}) | keys | given
    if arguments.exact_by_default:
        if "exact" in body:
            raise ValueError(f"--exact-by-default and exact = {as_json(body['exact'])}: allowed is one of the two")
        body["exact"] = {"default": True}
    return body


def print_answer(answer: dict[str, Any]) -> None:
    """The plan in force as a table of its keys, then what it did since it is in force."""
    console = open_console()
    plan, since = answer["in_force"], answer["since_switch"]
    table = Table("key", "value", "")
    for key, value in plan.items():
        if key == "overrides" and not value:
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        estimate = answer.get("estimated_acceptance")  # None where a step verifies one token, which is no draft
        if (key, value) == ("acceptance", AUTO) and estimate is not None:
            text += f", now {estimate:.3f}"
        table.add_row(key, text, "" if key in answer else "default")
    console.print(table)
    steps = ", ".join(f"{name} {count}" for name, count in since["outcomes"].items() if count) or "none"
    trial = ", a trial of a search that will put another back" if answer.get("trial") else ""
    plan = f"plan {answer.get('plan_hash', '-')}{trial}"
    console.print(f"{plan}; switches: {answer['switches']}; steps since the last: {steps}")
    if since["layer_steps"]:
        experts = f"{since['mean_before']:.1f} -> {since['mean_after']:.1f}"
        console.print(f"active experts of a layer and step: {experts}; kept mass: {since['mean_kept_mass']:.4f}")
        if since.get("exact_rows"):
            share, mass = since["exact_rows"] / since["rows"], since["others_kept_mass"]
            told = "" if mass is None else f"; kept mass of the others: {mass:.4f}"
            console.print(f"exact rows: {share:.1%}{told}")
    limits = answer["limits"]
    graphs = f"; graphs that select: {limits['selecting_rows'] or 'none'}" if limits["captured_rows"] else ""
    console.print(f"router rows of a step: {limits['batches']}{graphs}")
