"""Write docs/reference.md, the reference of all flags, keys, routes and metrics. It is generated from the code.

python -m scripts.reference           write the page
python -m scripts.reference --check   check that the page is up to date
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import REGISTRY

from scripts.compatibility import write_page
from sglang_xshare.affinity.controller import DecisionCounts
from sglang_xshare.affinity.decision import Decision
from sglang_xshare.cli import make_parser
from sglang_xshare.live.routes import add_routes
from sglang_xshare.patching.queue import find_root, list_releases
from sglang_xshare.policies import Policy, list_policies
from sglang_xshare.policies.common import COMMON_KEYS
from sglang_xshare.policies.keys import Key, spell_table
from sglang_xshare.policies.plan import KEYS, SelectionPlan
from sglang_xshare.policies.spelling import spell_policy
from sglang_xshare.stage.record.figures import FIGURES, PREFIX

PAGE = Path(__file__).resolve().parents[1] / "docs/reference.md"
ARGUMENT = re.compile(r'^\+    (\w+): A\[(?:Optional\[)?(\w+)\]?, "(.*)"\] = (.*)$', re.MULTILINE)
"""A pattern for a server argument that a patch adds. Its groups are the name, the type, the help and the default."""
TEXT = """\
# Reference

*What is there to set, to call and to watch?* Every flag, key, route and metric, written from the code by
`scripts/reference.py`. How to use them: [the guide](guide.md).

## Flags of the server

The patches add these flags to SGLang's. They are also keywords of `Engine`. `--load-balance-method` has the further
value `expert_affinity`.

{server}
## Policies

A key without a default must be given. The phases apply unless the key `phases` is given.

{policies}
## Keys of a policy

`null` switches a key off. An integer is at most 2147483647. The default is that of `custom`; a policy's own default,
above, takes precedence.

{keys}
## Keys of every policy that selects

{common}
## Routes

{routes}
Their fields: [operations.md](operations.md#get-and-post-expert_policy).

## Metrics

On `/metrics` with `--enable-metrics`; each series has SGLang's own labels too. Ranks are those of expert parallelism.
Plans are those that `observe` compares.

{metrics}
## Flags of `sglang-xshare`

{commands}"""


def make_page() -> str:
    """Return the text of the whole page."""
    return TEXT.format(
        server=tabulate(("flag", "value", "what"), list_server_flags()),
        policies=tabulate(("policy", "phases", "keys", "what"), map(_describe_policy, list_policies())),
        keys=tabulate(("key", "allowed", "default", "what"), list_keys()),
        common=tabulate(("key", "allowed", "default", "what"), list_common_keys()),
        routes=tabulate(("route", "required key"), list_routes()),
        metrics=tabulate(("metric", "labels", "what"), list_metrics()),
        commands=tabulate(("command", "flags"), list_command_flags()),
    )


def tabulate(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Format a table in Markdown."""
    lines = [headings, ("---",) * len(headings), *rows]
    return "".join("".join(f"| {cell} " if cell else "| " for cell in line) + "|\n" for line in lines)


def list_server_flags() -> Iterator[tuple[str, str, str]]:
    """Yield the name, the value and the help text of each flag that the patches of the newest release add."""
    patches = find_root()
    for name in (patches / list_releases(patches)[-1] / "series").read_text().split():
        for argument, kind, text, default in ARGUMENT.findall((patches / name).read_text()):
            value = {"False": "", "None": f"{kind}, none"}.get(default, f"{kind}, {default}")
            yield f"`--{argument.replace('_', '-')}`", value, text.replace("`", "")


def _describe_policy(policy: Policy) -> tuple[str, str, str, str]:
    """Return the row of a policy. If a policy restricts the values of a key, the row shows the allowed values."""
    keys = "every key below" if list(policy.keys) == list(KEYS) else ", ".join(_spell_defaults(policy))
    for preset, given in policy.presets.items():
        keys += f"; `{policy.name}:{preset}` is `{spell_policy(policy.name, given)}`"
    for name, words in policy.tables.items():
        keys += "".join(f"; `{name}={word}` is {spell_table(table)}" for word, table in words.items())
    phases = ", ".join(policy.phases) if policy.selects else ""
    return f"`{policy.name}`", phases, keys, policy.summary


def _spell_defaults(policy: Policy) -> Iterator[str]:
    for name, key in policy.keys.items():
        if name in policy.defaults:
            value = json.dumps(policy.default(name))
            more = f" ({policy.depends[name]})" if name in policy.depends else ""
            spelt = f"`{name}` {value}{more}"
        else:
            spelt = f"`{name}`"
        own = name in KEYS and key.allowed != KEYS[name].allowed
        yield f"{spelt}, {key.allowed}" if own else spelt


def list_keys() -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each key. The keys of a plan come first, and then the keys that only a single policy has."""
    plan = SelectionPlan()
    for name, key in KEYS.items():
        yield _describe_key(name, key, json.dumps(getattr(plan, name)), key.help)
    for policy in list_policies():
        for name, key in policy.keys.items():
            if name not in KEYS:
                yield _describe_key(name, key, "", f"`{policy.name}`: {key.help}")


def _describe_key(name: str, key: Key, default: str, text: str) -> tuple[str, str, str, str]:
    return f"`{name}`", f"{key.allowed}{', or null' if key.optional else ''}", default, text


def list_common_keys() -> Iterator[tuple[str, str, str, str]]:
    """Yield the row of each key that all policies share."""
    for name, key in COMMON_KEYS.items():
        default = "the policy's" if name == "phases" else json.dumps(key.default)
        yield f"`{name}`", key.allowed, default, key.help


def list_routes() -> Iterator[tuple[str, str]]:
    """Yield the method, the path and the required API key of each route that is added to SGLang's server."""
    app = FastAPI(openapi_url=None)
    add_routes(app, lambda: None)
    keys = {
        "normal": "`--api-key`, if the server has one",
        "admin_optional": "`--admin-api-key`, or if there is none `--api-key`",
    }
    for route in app.routes:
        level: Any = route.endpoint._auth_level  # type: ignore[attr-defined]
        for method in sorted(route.methods):  # type: ignore[attr-defined]
            yield f"`{method} {route.path}`", keys[level.value]  # type: ignore[attr-defined]


def list_metrics() -> Iterator[tuple[str, str, str]]:
    """Yield the row of each metric: first the policy's metrics, and then the metrics of expert affinity.

    A pair of metrics whose names end with "before" and "after" shares one row.
    """
    pairs: dict[str, list[tuple[str, str, str]]] = {}
    for figure in (figure for figures in FIGURES.values() for figure in figures):
        row = _describe_metric(PREFIX + figure.name, figure.kind, figure.labels, figure.text)
        pairs.setdefault(row[0].replace("_before", "_after"), []).append(row)
    for rows in pairs.values():
        names, labels, texts = zip(*rows, strict=True)
        yield ", ".join(names), labels[0], "; ".join(texts)
    before = {metric.name for metric in REGISTRY.collect()}
    DecisionCounts(1, export=True).count(Decision(0, "load"), [0])
    for metric in REGISTRY.collect():
        if metric.name not in before:
            yield _describe_metric(metric.name, metric.type, tuple(metric.samples[0].labels), metric.documentation)


def _describe_metric(name: str, kind: str, labels: tuple[str, ...], text: str) -> tuple[str, str, str]:
    return f"`{name}{'_total' if kind == 'counter' else ''}`", ", ".join(labels), text


def list_command_flags() -> Iterator[tuple[str, str]]:
    """Yield the name of each subcommand and its flags with their help texts."""
    for name, parser in _list_parsers("", make_parser()):
        yield f"`{name}`", "<br>".join(_list_flags(parser))


def _list_parsers(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the name and the parser of each subcommand that has no further subcommands."""
    nested = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield name, parser
    for choices in nested:
        for word, one in choices.items():
            yield from _list_parsers(f"{name} {word}".strip(), one)


def _list_flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.dest != "help":
            value = action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar or ())
            flag = " ".join(filter(None, [*action.option_strings[-1:], value]))
            yield f"`{flag}` {(action.help or '') % vars(action)}"


if __name__ == "__main__":
    write_page(PAGE, make_page, "python -m scripts.reference", __doc__)
