"""The subcommand `top`: a view of a running server's policy, updated every few seconds."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from statistics import mean
from typing import Any

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..console import open_console
from ..parser import between
from .client import Client, PolicyError, add_server, find_keys
from .command import describe_since

METRICS = "/metrics"
SPEED, ACCEPTED = "sglang:gen_throughput", "sglang:spec_accept_length"
RUNNING, QUEUED = "sglang:num_running_reqs", "sglang:num_queue_reqs"
HEADER = 13
"""The number of lines above the table of layers. A policy's keys may take several of these lines."""
BAR = 10
"""The width of a bar in characters. With this width, three tables of layers fit in 160 columns."""


@dataclass(frozen=True)
class Look:
    """The state of a server at one time.

    `answer` is the answer to GET /expert_policy. `gauges` maps the name of each gauge to one value for each replica.
    `time` is in seconds.
    """

    answer: dict[str, Any]
    gauges: dict[str, list[float]]
    time: float

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The counts of each MoE layer since the last switch. The list is empty for a server without a policy."""
        return list(self.answer.get("since_switch", {}).get("by_layer", ()))


def look(client: Client) -> Look:
    """Return the current state of a server.

    Raises `PolicyError` if the server refuses, if it does not answer, or if it lacks this package or has no metrics.
    """
    answer = client.get_policy()
    if "since_switch" in answer and "by_layer" not in (answer["since_switch"] or {}):
        raise PolicyError(
            f"{client.url}: the answer has no counts by layer; the server must have this package's version"
        )
    try:
        text = client.read(METRICS).decode(errors="replace")
    except PolicyError as error:
        if error.status != 404:
            raise
        raise PolicyError(f"{client.url}: no {METRICS}; the server must have --enable-metrics", 404) from None
    return Look(answer, read_gauges(text), time.monotonic())


def read_gauges(text: str) -> dict[str, list[float]]:
    """Read the gauges from prometheus's text format. Return one value of each gauge for each replica.

    Raises `PolicyError` if the text has another format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[str, float]] = {name: {} for name in (SPEED, ACCEPTED, RUNNING, QUEUED)}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples if family.name in found else ():
                # Each rank of a replica may export the same gauge.
                replica = sample.labels.get("dp_rank", "")
                found[family.name][replica] = max(sample.value, found[family.name].get(replica, 0.0))
    except (ValueError, IndexError) as error:
        raise PolicyError(f"{METRICS}: no metrics ({error}); the server must be SGLang's") from None
    return {name: list(values.values()) for name, values in found.items()}


def subtract(now: Look, before: Look) -> list[dict[str, Any]] | None:
    """Return the counts of each layer between two looks, or None if the policy or the server has changed."""
    latter, former = ([(one["layer"], *one) for one in at.layers] for at in (now, before))
    if now.answer.get("switches") != before.answer.get("switches") or latter != former:
        return None
    pairs = zip(now.layers, before.layers, strict=True)
    layers = [{name: new[name] - old[name] for name in new} | {"layer": new["layer"]} for new, old in pairs]
    return None if any(min(one["layer_steps"], one["rows"]) < 0 for one in layers) else layers


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `top`."""
    description = "watch a running server's policy: active experts and kept mass by layer, speed, the active policy"
    parser = subparsers.add_parser("top", help=description, description=description)
    add_server(parser, "--expert-policy and --enable-metrics", admin=False)
    span, text = between(0.1, 3600, what="a number of seconds"), "between two frames (default: 2)"
    parser.add_argument("--interval", type=span, default=2.0, metavar="SECONDS", help=text)
    parser.set_defaults(run=_run, name="top")


def _run(arguments: argparse.Namespace) -> int:
    client, console = Client(arguments.url, *find_keys(arguments)), open_console()
    before, now = None, look(client)  # first, so a refusal is printed before the terminal is cleared
    if not console.is_terminal:
        console.print(draw(client.url, now, None, len(now.layers)))
        return 0
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(draw(client.url, now, before, max(console.height - HEADER, 8)), refresh=True)
            time.sleep(arguments.interval)
            before, now = now, look(client)


def draw(url: str, now: Look, before: Look | None, lines: int) -> RenderableType:
    """Return the screen that `top` shows.

    The counts are those between the looks `before` and `now`. If `before` is None, the counts begin at the last switch.
    A column has at most `lines` layers. Speed and accepted length are SGLang's gauges of its last log interval. The
    speed is the sum over replicas in tokens/s. The accepted length is the mean over replicas in tokens per
    verification.
    """
    answer, gauges = now.answer, now.gauges
    plan = {name: value for name, value in answer["in_force"].items() if value is not None and value != []}
    keys = ", ".join(f"{name}={json.dumps(value)}" for name, value in plan.items() if name != "policy")
    speed = sum(gauges[SPEED]) if gauges[SPEED] else None
    verified = [length for length in gauges[ACCEPTED] if length]
    speeds = f"{_number(speed, 1)} tokens/s, accepted length {_number(mean(verified) if verified else None, 2)}"
    start = "the last switch" if answer.get("switches") else "the server's start"
    layers, span = now.layers, f"since {start}"
    if before and (latest := subtract(now, before)):
        layers, span = latest, f"of the last {now.time - before.time:.1f} s"
    name = f"{url}: {plan['policy']}"
    running = Text(f"{speeds}; {sum(gauges[RUNNING]):.0f} running, {sum(gauges[QUEUED]):.0f} queued")
    depths = [Text(describe_depths(answer["draft_depth"]))] if "draft_depth" in answer else []
    if "since_switch" not in answer:
        return Group(Text(name, style="bold"), running, *depths)
    return Group(
        Text(f"{name}, plan {answer['plan_hash']}", style="bold"),
        Text(keys, style="dim"),
        running,
        Text(describe_since(answer)),
        *depths,
        Text(f"Active experts of a step by layer, {span}:"),
        Columns([_draw_layers(layers[first : first + lines]) for first in range(0, len(layers), lines)]),
    )


def describe_depths(depths: dict[str, Any]) -> str:
    """Return one line with the draft depth, the tokens and the step time of each batch size."""
    sizes = [
        f"{one['batch_size']}: {one['depth']} ({one['tokens']:.2f} tokens in {_number(one['ms'], 1)} ms)"
        for one in depths["batch_sizes"]
    ]
    return f"Draft depth by batch size: {', '.join(sizes) or '-'}"


def _draw_layers(layers: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("layer", "before", "after"):
        table.add_column(heading, justify="right")
    table.add_column("", width=BAR)
    table.add_column("kept mass", justify="right")
    for one in layers:
        steps, rows = one["layer_steps"], one["rows"]
        before, after = (one[name] / steps if steps else None for name in ("experts_before", "experts_after"))
        mass = one["kept_mass"] / rows if rows else None
        bar = ProgressBar(before or 1, after or 0, width=BAR) if steps else ""
        table.add_row(str(one["layer"]), _number(before, 1), _number(after, 1), bar, _number(mass, 4))
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
