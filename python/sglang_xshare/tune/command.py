"""The subcommand `tune`: its flags, its progress, what it leaves."""

from __future__ import annotations

import argparse
import hashlib
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Console

from ..console import open_console
from ..files import try_folder
from ..live.client import Client, PolicyError, add_server, find_keys
from ..parser import path, whole
from ..policies.keys import read_object
from ..policies.plan import SelectionPlan
from ..policies.registry import build_plan
from ..policies.spelling import SPELLING, parse_policy
from ..types import Router
from .guard import Switched, SwitchGuard
from .plans import FIRST_SIZE, VANILLA_SETTING, Layers, group_layers, join_batches
from .texts import Sample, read_samples

if TYPE_CHECKING:
    from .measure import Bench
    from .search import Found

DESCRIPTION = (
    "find the setting with the fewest experts active, or paged in, within a tolerated loss, on the running server"
)
LADDER = ("k0=0,add=8", *(f"k0=1,add={add}" for add in (0, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32)))
SETTINGS = tuple(f"xshare:{keys},utility=squared,own_share=0.75" for keys in LADDER)
TIGHTEST = "xshare:k0=1,add=1,utility=squared,own_share=0.75"
"""Graphs captured under it follow to all of them, and to vanilla; those captured without a budget to none."""
ASKED = "asked.json"
"""Of the folder: what its trace was measured of."""
GROUPS = 8
"""Of layers, at most, where not given."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `tune`."""
    parser = subparsers.add_parser("tune", help=DESCRIPTION, description=DESCRIPTION, allow_abbrev=False)
    flag = parser.add_argument
    add_server(parser, "--expert-policy and --enable-custom-logit-processor")
    settings = f"a setting to choose from: {SPELLING} (default: {len(SETTINGS)} of xshare)"
    flag("policies", nargs="*", type=_setting, default=list(SETTINGS), metavar="POLICY", help=settings)
    flag("--texts", type=path, required=True, metavar="DIR", help="*.txt of your own traffic, a kind of text each")
    tolerance = (
        "rise of cross-entropy, such as 0.5%%; the greedy agreement with vanilla that it leaves is told beside it"
    )
    flag("--tolerance", type=_share, required=True, metavar="SHARE", help=tolerance)
    flag(
        "--out", type=path, required=True, metavar="DIR", help="for the plan, the report, and the trace to resume from"
    )
    flag("--batches", type=whole(2), nargs="+", default=[16], metavar="N", help="requests that decode together (16)")
    text = f"groups of layers with a setting of their own ({GROUPS})"
    flag("--groups", type=whole(), default=GROUPS, metavar="N", help=text)
    flag("--samples", type=whole(2), default=64, metavar="N", help="texts to tune on, and as many held out (64)")
    flag("--prompt", type=whole(), default=64, metavar="N", help="tokens of each that are prefilled (64)")
    flag("--tokens", type=whole(), default=64, metavar="N", help="tokens of each that are decoded (64)")
    parser.set_defaults(run=_run, name="tune")


def _run(arguments: argparse.Namespace) -> int:
    goes_on = f"the same command goes on from {arguments.out}"
    try:
        tune(arguments)
    except Switched as error:
        raise PolicyError(f"{error}; {goes_on}") from None
    except KeyboardInterrupt:
        print(f"tune: interrupted; {goes_on}", file=sys.stderr)
        return 130
    return 0


def tune(arguments: argparse.Namespace) -> None:
    """Search for every batch size, and leave plan.json, report.json and front.png. The server has its own policy again
    afterwards, whatever happens, unless somebody else has switched it.
    """
    guard, console = SwitchGuard(Client(arguments.url, *find_keys(arguments))), open_console()
    _check_server(guard.before, arguments)
    try_folder("--out", arguments.out)
    # They import torch, for which neither the other subcommands nor what is refused need wait.
    from .gauge import Gauge, pages
    from .measure import Bench
    from .report import plot_found, print_found, summarize
    from .search import ACTIVE, PAGED, count_measurements, search
    from .server import Server

    server = Server(arguments.url, *find_keys(arguments))
    groups = group_layers(guard.before["limits"]["moe_layers"], arguments.groups)
    asked, batch = (arguments.prompt, arguments.tokens, arguments.samples), max(arguments.batches)
    samples = read_samples(arguments.texts, server.tokenize, *asked, batch=batch)
    unit = PAGED if pages(guard.before["since_switch"]) else ACTIVE
    check_asked(arguments.out, server.get_model(), groups, samples, unit)
    gauge = Gauge(server, dict(zip(("tuning", "held out"), samples, strict=True)), guard)
    bench = Bench(gauge, arguments.out / "trace.jsonl")
    console.print(f"At the end it puts back: {guard}", soft_wrap=True)
    found: list[Found] = []
    try:
        with _interrupted():
            for batch in sorted(set(arguments.batches)):
                total = count_measurements(len(groups), len(arguments.policies))
                with _progress(console, bench, f"{batch} rows", total) as tell:
                    found.append(search(bench, groups, arguments.policies, batch, arguments.tolerance, tell, unit))
                print_found(found[-1], console)
    finally:
        if guard.restore():
            console.print(f"Put back: {guard}", soft_wrap=True)
    policy = join_batches(
        {one.batch: one.chosen.settings if one.chosen else {groups[0]: VANILLA_SETTING} for one in found}
    )
    if policy["policy"] != VANILLA_SETTING:
        policy |= _keep(guard.before, unit == PAGED)
    _leave(arguments.out, policy, found)
    name = policy.pop("policy")
    lines = [f"Measured {bench.measured} times; report: {arguments.out}/report.json", *map(summarize, found)]
    if plot_found(found, arguments.out / "front.png"):
        lines.insert(0, f"Plot: {arguments.out}/front.png")
    if name != VANILLA_SETTING:
        lines.append(f"Now: sglang-xshare policy set {arguments.url} {name} --config {arguments.out}/plan.json")
        lines.append(f"Or start with: --expert-policy {name} --expert-policy-config {arguments.out}/plan.json")
    for line in lines:
        console.print(line, soft_wrap=True)


def _keep(before: dict[str, Any], is_paging: bool) -> dict[str, Any]:
    """Keys beside what was searched for: the server's own exact requests, and min_rows, as one row was not measured."""
    kept = {"exact": before["exact"]} if "exact" in before else {}
    return kept | ({"min_rows": FIRST_SIZE} if is_paging else {})


@contextmanager
def _progress(console: Console, bench: Bench, title: str, total: int) -> Iterator[Callable[[str], None]]:
    """What tells a line of a search of about `total` measurements, and how far it is: a bar, or a count in a log."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    hidden = not console.is_terminal
    # A measurement may take minutes: rich's own window of 30 s would tell no time that is left.
    with Progress(*columns, console=console, transient=True, disable=hidden, speed_estimate_period=1800) as bar:
        console.print(f"{title}: about {total} measurements")
        task, before, known = bar.add_task(title, total=total), len(bench.asked), bench.measured

        def tell(line: str) -> None:
            done = len(bench.asked) - before
            if bench.measured == known:  # what was known takes no time, and tells none
                bar.reset(task)
            bar.update(task, completed=done, total=max(total, done))
            left = bar.tasks[task].time_remaining
            far = f"{done} of about {total}" + (f", about {math.ceil(left / 60)} min left" if left else "")
            console.print(f"{far}: {line}" if hidden else line)

        yield tell


@contextmanager
def _interrupted() -> Iterator[None]:
    """A lost terminal and a kill are interruptions too: the server must not keep the plan that was just measured."""
    stops = (signal.SIGTERM, signal.SIGHUP)
    former = [signal.signal(number, signal.default_int_handler) for number in stops]
    try:
        yield
    finally:
        for number, handler in zip(stops, former, strict=True):
            signal.signal(number, handler)


def _check_server(answer: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Refuse settings and batches that the server cannot have, and one whose CUDA graphs would follow no switch."""
    limits, largest = answer["limits"], max(arguments.batches)
    for setting in arguments.policies:
        try:
            plan, router = _build(setting), Router(**limits["router"])
            plan.check(router, len(plan.order or ()) or router.top_k, ranks=2)
        except ValueError as error:
            raise ValueError(f"POLICY {setting}: {error}") from None
    if limits["most_rows"] is not None and largest > limits["most_rows"]:
        reason = f"the server decodes {limits['most_rows']} at a time; allowed are as many, or more there"
        raise ValueError(f"--batches {largest}: {reason} (--max-running-requests)")
    if limits["captured_rows"] and answer["policy"] in ("observe", VANILLA_SETTING):
        reason = f"its CUDA graphs were captured under {answer['policy']} and follow no switch"
        raise ValueError(
            f"{reason}; allowed is a server started with the tightest setting that has a budget, such as "
            f"--expert-policy '{TIGHTEST}'"
        )


def _leave(out: Path, policy: dict[str, Any], found: list[Found]) -> None:
    """plan.json is what --expert-policy-config takes."""
    from .report import describe_found

    keys = {name: value for name, value in policy.items() if name != "policy"}
    (out / "plan.json").write_bytes(orjson.dumps(keys, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    report = {"policy": policy, "batches": [describe_found(one) for one in found]}
    (out / "report.json").write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def check_asked(
    out: Path, model: str, groups: Sequence[Layers], samples: Sequence[Sequence[Sample]], unit: str
) -> None:
    """Refuse to go on from a trace of another model, other samples, another `unit`, or other figures."""
    from .measure import Measurement

    tokens = [[one.prompt, one.text] for part in samples for one in part]
    digest = hashlib.sha256(orjson.dumps(tokens)).hexdigest()
    asked: dict[str, Any] = {"model": model, "layers": [list(one) for one in groups], "samples": digest}
    asked |= {"figures": [one.name for one in fields(Measurement)], "counted": unit}
    file = out / ASKED
    if file.exists():
        try:
            known = read_object(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"--out {out}: {ASKED}: {error}, or another folder") from None
        for name in asked:
            if known.get(name) != asked[name]:
                raise ValueError(f"--out {out}: begun with other {name}; allowed is another folder")
    file.write_bytes(orjson.dumps(asked, option=orjson.OPT_INDENT_2))


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: allowed is a share above 0 such as 0.5% or 0.005")
    return value


def _build(setting: str) -> SelectionPlan:
    name, keys = parse_policy(setting)
    if name in (VANILLA_SETTING, "observe"):
        raise ValueError(f"policy {setting!r}: allowed is one that selects")
    return build_plan({"policy": name, **keys})


def _setting(text: str) -> str:
    try:
        _build(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
