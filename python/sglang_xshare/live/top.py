"""The subcommand `top`: a running server's policy at work, drawn anew every few seconds."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict

import orjson
from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..console import open_console
from .client import Client, PolicyError, add_server, find_keys
from .frame import Frame, LayerLoad, Look, compare, look

HEADER = 13
"""Lines of a terminal that layers do not get; a plan may take several."""
BAR = 10
"""Columns: three tables stand side by side in 160."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `top`."""
    description = "watch a running server's policy: active experts and kept mass by layer, speed, the plan in force"
    parser = subparsers.add_parser("top", help=description, description=description)
    add_server(parser, "--expert-policy and --enable-metrics", admin=False)
    parser.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="SECONDS", help="between two looks (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="one frame, of all since the plan is in force")
    parser.add_argument("--json", action="store_true", help="a line of JSON a frame")
    parser.set_defaults(run=_run)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: allowed are seconds from 0.1 to 3600")
    return seconds


def _run(arguments: argparse.Namespace) -> int:
    try:
        client = Client(arguments.url, *find_keys(arguments))
        first = look(client, time.monotonic())  # what refuses does so before a terminal is taken
        with ExitStack() as stack:
            show = _print_json if arguments.json else _draw_on(open_console(), stack)
            show(compare(first, None))
            for frame in () if arguments.once else _watch(client, first, arguments.interval):
                show(frame)
    except PolicyError as error:
        print(f"top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


def _watch(client: Client, before: Look, interval: float) -> Iterator[Frame]:
    """A frame every `interval` seconds. Raises `PolicyError` once the server does not answer."""
    while True:
        time.sleep(interval)
        now = look(client, time.monotonic())
        yield compare(now, before)
        before = now


def _print_json(frame: Frame) -> None:
    print(orjson.dumps(asdict(frame)).decode(), flush=True)


def _draw_on(console: Console, stack: ExitStack) -> Callable[[Frame], None]:
    """What shows a frame: in place of the last one on a terminal, else below it."""
    if not console.is_terminal:
        return lambda frame: console.print(draw(frame, len(frame.layers)))
    live = stack.enter_context(Live(console=console, auto_refresh=False))
    return lambda frame: live.update(draw(frame, max(console.height - HEADER, 8)), refresh=True)


def draw(frame: Frame, lines: int) -> RenderableType:
    """A frame, with at most so many layers one below the other."""
    plan = {name: value for name, value in frame.in_force.items() if value is not None and value != []}
    keys = ", ".join(f"{name}={json.dumps(value)}" for name, value in plan.items() if name != "policy")
    since = frame.since_switch
    steps = ", ".join(f"{name} {count}" for name, count in since["outcomes"].items() if count) or "none"
    counted = f"{_number(since['mean_before'], 1)} -> {_number(since['mean_after'], 1)}"
    if "mean_page_ins" in since:
        counted += f", page-ins {since['mean_page_ins_before']:.1f} -> {since['mean_page_ins']:.1f}"
    counted += f", kept mass {_number(since['mean_kept_mass'], 4)}"
    if since.get("exact_rows"):
        share = since["exact_rows"] / since["rows"]
        counted += f"; exact rows {share:.1%}, kept mass of the others {_number(since['others_kept_mass'], 4)}"
    speed = f"{_number(frame.tokens_per_second, 1)} tokens/s, accepted length {_number(frame.accepted_length, 2)}"
    start = "the last switch" if frame.switches else "the server's start"
    span = f"since {start}" if frame.seconds is None else f"of the last {frame.seconds:.1f} s"
    tables = [_draw_layers(frame.layers[first : first + lines]) for first in range(0, len(frame.layers), lines)]
    return Group(
        Text(f"{frame.url}: {plan['policy']}, plan {frame.plan_hash}", style="bold"),
        Text(keys, style="dim"),
        Text(f"{speed}; {frame.running} running, {frame.queued} queued"),
        Text(f"switches: {frame.switches}; steps since the last: {steps}"),
        Text(f"active experts since the last: {counted if since['layer_steps'] else '-'}"),
        Text(f"Active experts of a step by layer, {span}:"),
        Columns(tables),
    )


def _draw_layers(layers: list[LayerLoad]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("layer", "before", "after"):
        table.add_column(heading, justify="right")
    table.add_column("", width=BAR)
    table.add_column("kept mass", justify="right")
    for load in layers:
        bar = "" if load.before is None else ProgressBar(load.before or 1, load.after or 0, width=BAR)
        cells = _number(load.before, 1), _number(load.after, 1), bar, _number(load.kept_mass, 4)
        table.add_row(str(load.layer), *cells)
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
