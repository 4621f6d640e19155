"""The policies as a table for people and as JSON for programs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from ..console import open_console
from .common import COMMON_KEYS
from .registry import Policy


def print_table(policies: Sequence[Policy]) -> None:
    """Print each policy's keys, ranges, defaults and paper's settings, and the keys that all policies share."""
    console = open_console()
    for policy in policies:
        console.print(f"[bold]{policy.name}[/bold]  {policy.summary}")
        console.print(f"  {policy.paper}; phases: {', '.join(policy.phases)}", style="dim")
        if policy.keys:
            rows = [(name, _format_default(policy, name), key.allowed, key.help) for name, key in policy.keys.items()]
            console.print(_make_table(rows))
        for preset, keys in policy.presets.items():
            console.print(f"  {policy.name}:{preset} is {_join(keys)}")
        for setting in policy.published:
            console.print(f"  recommended: [bold]{_join(setting.keys)}[/bold]  {setting.result}")
        console.print()
    console.print("[bold]every policy that selects[/bold]  Where and when it applies.")
    common = [
        (name, "the policy's" if name == "phases" else _format(key.default), escape(key.allowed), key.help)
        for name, key in COMMON_KEYS.items()
    ]
    console.print(_make_table(common))


def _make_table(rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
    for column in ("key", "default", "allowed", "meaning"):
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    return table


def format_json(policies: Sequence[Policy]) -> str:
    """The same as a JSON list; a required key has no default."""
    return json.dumps([_describe(policy) for policy in policies], indent=2)


def _describe(policy: Policy) -> dict[str, Any]:
    keys = {}
    for name, key in policy.keys.items():
        keys[name] = {"allowed": key.allowed, "meaning": key.help}
        if name in policy.defaults:
            keys[name]["default"] = policy.default(name)
        if name in policy.depends:
            keys[name]["default_depends"] = policy.depends[name]
    defaults = {name: key.default for name, key in COMMON_KEYS.items()} | {"phases": policy.phases}
    common = {
        name: {"allowed": key.allowed, "meaning": key.help, "default": defaults[name]}
        for name, key in COMMON_KEYS.items()
    }
    return {
        "policy": policy.name,
        "summary": policy.summary,
        "paper": policy.paper,
        "phases": policy.phases,
        "keys": keys,
        "common_keys": common if policy.selects else {},
        "recommended": [{"keys": dict(setting.keys), "result": setting.result} for setting in policy.published],
        "presets": policy.presets,
    }


def _format_default(policy: Policy, name: str) -> str:
    if name not in policy.defaults:
        return "required"
    default = _format(policy.default(name))
    return f"{default}; {policy.depends[name]}" if name in policy.depends else default


def _join(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in keys.items())


def _format(default: Any) -> str:
    return json.dumps(default).strip('"')
