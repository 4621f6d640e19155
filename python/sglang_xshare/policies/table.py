"""The table that lists all policies with their keys and recommended settings."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from ..console import open_console
from .common import COMMON_KEYS
from .keys import spell_table
from .registry import Policy
from .spelling import spell_policy


def print_table(policies: Sequence[Policy]) -> None:
    """Print the keys and recommended settings of each policy, and then the keys that all selecting policies share."""
    console = open_console()
    for policy in policies:
        console.print(f"[bold]{policy.name}[/bold]  {policy.summary}")
        console.print(f"  {policy.paper}; phases: {', '.join(policy.phases)}", style="dim")
        if policy.keys:
            rows = [(name, _format_default(policy, name), key.allowed, key.help) for name, key in policy.keys.items()]
            console.print(_make_table(rows))
        for preset, keys in policy.presets.items():
            console.print(f"  {policy.name}:{preset} is {spell_policy(policy.name, keys)}")
        for name, words in policy.tables.items():
            for word, table in words.items():
                console.print(f"  {name}={word} is {spell_table(table)}")
        for setting in policy.published:
            console.print(f"  recommended: [bold]{spell_policy(policy.name, setting.keys)}[/bold]  {setting.result}")
        console.print()
    console.print("[bold]every policy that selects[/bold]  Where and when the policy applies.")
    common = [
        (name, "the policy's" if name == "phases" else _format(key.default), escape(key.allowed), key.help)
        for name, key in COMMON_KEYS.items()
    ]
    console.print(_make_table(common))


def _make_table(rows: Iterable[Sequence[str]]) -> Table:
    table = Table("key", "default", "allowed", "meaning", box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*row)
    return table


def _format_default(policy: Policy, name: str) -> str:
    if name not in policy.defaults:
        return "required"
    default = _format(policy.default(name))
    return f"{default}; {policy.depends[name]}" if name in policy.depends else default


def _format(default: Any) -> str:
    return json.dumps(default).strip('"')
