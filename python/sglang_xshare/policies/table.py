"""The policies as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from .registry import Policy


def print_table(policies: Sequence[Policy]) -> None:
    """Print each policy's keys with their ranges and defaults, and the settings its paper recommends."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for policy in policies:
        console.print(f"[bold]{policy.name}[/bold]  {policy.summary}")
        console.print(f"  {policy.paper}; phases: {', '.join(policy.phases)}", style="dim")
        if policy.keys:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
            for column in ("key", "default", "allowed", "meaning"):
                table.add_column(column)
            for name, key in policy.keys.items():
                table.add_row(name, _format_default(policy, name), key.allowed, key.help)
            console.print(table)
        for setting in policy.published:
            keys = ", ".join(f"{name}={value}" for name, value in setting.keys.items())
            console.print(f"  recommended: [bold]{keys}[/bold]  {setting.result}")
        console.print()
    console.print(
        "Every policy also takes phases, min_tokens, max_tokens, layers and by_batch: where and when it applies."
    )


def format_json(policies: Sequence[Policy]) -> str:
    """The same as a JSON list; a required key has no default."""
    return json.dumps([_describe(policy) for policy in policies], indent=2)


def _describe(policy: Policy) -> dict[str, Any]:
    keys = {}
    for name, key in policy.keys.items():
        keys[name] = {"allowed": key.allowed, "meaning": key.help}
        if name in policy.defaults:
            keys[name]["default"] = policy.bare.get(name, policy.defaults[name])
    return {
        "policy": policy.name,
        "summary": policy.summary,
        "paper": policy.paper,
        "phases": policy.phases,
        "keys": keys,
        "recommended": [{"keys": dict(setting.keys), "result": setting.result} for setting in policy.published],
        "defaults_with_speculation": policy.default_keys(speculative=True),
    }


def _format_default(policy: Policy, name: str) -> str:
    if name not in policy.defaults:
        return "required"
    default = policy.bare.get(name, policy.defaults[name])
    return "off" if default is None else json.dumps(default).strip('"')
