"""The subcommand `top`: a running server's policy at work, drawn anew every few seconds."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import mean
from typing import Any

import orjson
from rich import box
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ..console import open_console
from ..parser import between
from .client import Client, PolicyError, add_server, find_keys

METRICS = "/metrics"
SPEED, ACCEPTED = "sglang:gen_throughput", "sglang:spec_accept_length"
RUNNING, QUEUED = "sglang:num_running_reqs", "sglang:num_queue_reqs"
HEADER = 13
"""Lines of a terminal that layers do not get; a plan may take several."""
BAR = 10
"""Columns: three tables stand side by side in 160."""


@dataclass(frozen=True)
class Look:
    """One answer of the server: to GET /expert_policy, and its gauges by name and replica; `time` in seconds."""

    url: str
    answer: dict[str, Any]
    gauges: dict[str, list[float]]
    time: float


def look(client: Client, time: float) -> Look:
    """Ask a server. Raises `PolicyError` where it is gone, has no policy or no metrics, or refuses to tell."""
    answer = client.get_policy()
    if "by_layer" not in (answer.get("since_switch") or {}):
        raise PolicyError(f"{client.url}: it tells nothing by layer; allowed is a server with this package's version")
    try:
        text = client.read(METRICS).decode(errors="replace")
    except PolicyError as error:
        if error.status != 404:
            raise
        raise PolicyError(f"{client.url}: no {METRICS}; allowed is a server with --enable-metrics", 404) from None
    return Look(client.url, answer, read_gauges(text), time)


def read_gauges(text: str) -> dict[str, list[float]]:
    """The gauges of a frame, a value a replica, from prometheus's text. Raises `PolicyError` for what is none."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[str, float]] = {name: {} for name in (SPEED, ACCEPTED, RUNNING, QUEUED)}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples if family.name in found else ():
                # Ranks of one replica may each export the same.
                replica = sample.labels.get("dp_rank", "")
                found[family.name][replica] = max(sample.value, found[family.name].get(replica, 0.0))
    except (ValueError, IndexError) as error:
        raise PolicyError(f"{METRICS}: no metrics ({error}); allowed is an SGLang server") from None
    return {name: list(values.values()) for name, values in found.items()}


def compare(now: Look, before: Look | None) -> dict[str, Any]:
    """The frame of what happened between two looks, as --json prints it; with `seconds` None of all since the plan is
    in force: without an earlier look, or where that was at another plan or before a restart. Counts are GET
    /expert_policy's; speed (tokens/s), of replicas together, and accepted length (tokens a verification), their mean,
    SGLang's gauges of its last log interval, None where it has set none.
    """
    layers = now.answer["since_switch"]["by_layer"]
    former = before.answer["since_switch"]["by_layer"] if before else []
    if before and not (now.answer["switches"] == before.answer["switches"] and _continues(layers, former)):
        before, former = None, []
    verifies = [length for length in now.gauges[ACCEPTED] if length]
    return {
        "url": now.url,
        **{name: now.answer[name] for name in ("in_force", "plan_hash", "switches", "since_switch")},
        "seconds": now.time - before.time if before else None,
        "layers": list(_subtract(layers, former or [dict.fromkeys(layer, 0) for layer in layers])),
        "tokens_per_second": sum(now.gauges[SPEED]) if now.gauges[SPEED] else None,
        "accepted_length": mean(verifies) if verifies else None,
        "running": int(sum(now.gauges[RUNNING])),
        "queued": int(sum(now.gauges[QUEUED])),
    }


def _continues(layers: list[dict[str, Any]], former: list[dict[str, Any]]) -> bool:
    """Whether these are later counts of the same server."""
    return len(layers) == len(former) and all(
        new["layer"] == old["layer"]
        and new.keys() == old.keys()
        and all(new[name] >= old[name] for name in ("layer_steps", "rows"))
        for new, old in zip(layers, former, strict=True)
    )


def _subtract(layers: list[dict[str, Any]], former: list[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Of each layer mean active experts of a step under vanilla routing and under the policy, mean kept mass of a row,
    and mean page-ins of a step; None without a step under policy, or without paging.
    """
    for now, then in zip(layers, former, strict=True):
        new = {name: now[name] - then[name] for name in now}
        yield {
            "layer": now["layer"],
            "before": _divide(new, "experts_before", "layer_steps"),
            "after": _divide(new, "experts_after", "layer_steps"),
            "kept_mass": _divide(new, "kept_mass", "rows"),
            "page_ins_before": _divide(new, "page_ins_before", "layer_steps"),
            "page_ins": _divide(new, "page_ins", "layer_steps"),
        }


def _divide(counts: Mapping[str, Any], count: str, of: str) -> float | None:
    return counts[count] / counts[of] if count in counts and counts[of] else None


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `top`."""
    description = "watch a running server's policy: active experts and kept mass by layer, speed, the plan in force"
    parser = subparsers.add_parser("top", help=description, description=description)
    add_server(parser, "--expert-policy and --enable-metrics", admin=False)
    parser.add_argument(
        "--interval",
        type=between(0.1, 3600, what="a number of seconds"),
        default=2.0,
        metavar="SECONDS",
        help="between two looks (default: 2)",
    )
    parser.add_argument("--once", action="store_true", help="one frame, of all since the plan is in force")
    parser.add_argument("--json", action="store_true", help="a line of JSON a frame")
    parser.set_defaults(run=_run, name="top")


def _run(arguments: argparse.Namespace) -> int:
    try:
        client = Client(arguments.url, *find_keys(arguments))
        first = look(client, time.monotonic())  # what refuses does so before a terminal is taken
        with ExitStack() as stack:
            show = _print_json if arguments.json else _draw_on(open_console(), stack)
            show(compare(first, None))
            for frame in () if arguments.once else _watch(client, first, arguments.interval):
                show(frame)
    except KeyboardInterrupt:
        pass
    return 0


def _watch(client: Client, before: Look, interval: float) -> Iterator[dict[str, Any]]:
    """A frame every `interval` seconds. Raises `PolicyError` once the server does not answer."""
    while True:
        time.sleep(interval)
        now = look(client, time.monotonic())
        yield compare(now, before)
        before = now


def _print_json(frame: dict[str, Any]) -> None:
    print(orjson.dumps(frame).decode(), flush=True)


def _draw_on(console: Console, stack: ExitStack) -> Callable[[dict[str, Any]], None]:
    """What shows a frame: in place of the last one on a terminal, else below it."""
    if not console.is_terminal:
        return lambda frame: console.print(draw(frame, len(frame["layers"])))
    live = stack.enter_context(Live(console=console, auto_refresh=False))
    return lambda frame: live.update(draw(frame, max(console.height - HEADER, 8)), refresh=True)


def draw(frame: dict[str, Any], lines: int) -> RenderableType:
    """A frame, with at most so many layers one below the other."""
    plan = {name: value for name, value in frame["in_force"].items() if value is not None and value != []}
    keys = ", ".join(f"{name}={json.dumps(value)}" for name, value in plan.items() if name != "policy")
    since = frame["since_switch"]
    steps = ", ".join(f"{name} {count}" for name, count in since["outcomes"].items() if count) or "none"
    counted = f"{_number(since['mean_before'], 1)} -> {_number(since['mean_after'], 1)}"
    if "mean_page_ins" in since:
        counted += f", page-ins {since['mean_page_ins_before']:.1f} -> {since['mean_page_ins']:.1f}"
    counted += f", kept mass {_number(since['mean_kept_mass'], 4)}"
    if since.get("exact_rows"):
        share = since["exact_rows"] / since["rows"]
        counted += f"; exact rows {share:.1%}, kept mass of the others {_number(since['others_kept_mass'], 4)}"
    speed = f"{_number(frame['tokens_per_second'], 1)} tokens/s, accepted length {_number(frame['accepted_length'], 2)}"
    start = "the last switch" if frame["switches"] else "the server's start"
    span = f"since {start}" if frame["seconds"] is None else f"of the last {frame['seconds']:.1f} s"
    tables = [_draw_layers(frame["layers"][first : first + lines]) for first in range(0, len(frame["layers"]), lines)]
    return Group(
        Text(f"{frame['url']}: {plan['policy']}, plan {frame['plan_hash']}", style="bold"),
        Text(keys, style="dim"),
        Text(f"{speed}; {frame['running']} running, {frame['queued']} queued"),
        Text(f"switches: {frame['switches']}; steps since the last: {steps}"),
        Text(f"active experts since the last: {counted if since['layer_steps'] else '-'}"),
        Text(f"Active experts of a step by layer, {span}:"),
        Columns(tables),
    )


def _draw_layers(layers: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("layer", "before", "after"):
        table.add_column(heading, justify="right")
    table.add_column("", width=BAR)
    table.add_column("kept mass", justify="right")
    for load in layers:
        bar = "" if load["before"] is None else ProgressBar(load["before"] or 1, load["after"] or 0, width=BAR)
        cells = _number(load["before"], 1), _number(load["after"], 1), bar, _number(load["kept_mass"], 4)
        table.add_row(str(load["layer"]), *cells)
    return table


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
