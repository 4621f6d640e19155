"""The subcommand `tune`, with its flags, its progress lines and its output files."""

from __future__ import annotations

import argparse
import math
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from rich.console import Console

from ..console import open_console
from ..files import try_folder
from ..live.client import Client, add_server, find_keys
from ..parser import path, whole
from ..policies.plan import SelectionPlan
from ..policies.registry import build_plan
from ..policies.spelling import SPELLING, parse_policy
from ..types import Router
from ..upstream.server import attention_dp_size
from .guard import SwitchGuard
from .plans import FIRST_SIZE, VANILLA_SETTING, group_layers, join_batches
from .texts import read_samples

if TYPE_CHECKING:
    from .measure import Bench
    from .search import Found

DESCRIPTION = (
    "find the setting with the fewest experts active, or paged in, within a tolerated loss, on the running server"
)
LADDER = ("k0=0,add=8", *(f"k0=1,add={add}" for add in (0, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32)))
SETTINGS = tuple(f"xshare:{keys},utility=squared,own_share=0.75" for keys in LADDER)
PROCESSOR = "--enable-custom-logit-processor"
"""The flag that a server needs to decode forced text. A logit processor then reports the model's own log-probabilities.
If the text were scored as a prompt, the log-probabilities would come from a prefill. If a grammar forced the text, they
would be computed after the grammar's mask.
"""
WARNING = f"Warning: with {PROCESSOR} SGLang unpickles what any client sends, which can run code in the server"
ADVICE = "tune on a server that nobody else can reach, and serve without that flag"
GROUPS = 8
"""The default of --groups."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `tune`."""
    parser = subparsers.add_parser("tune", help=DESCRIPTION, description=DESCRIPTION, allow_abbrev=False)
    flag = parser.add_argument
    add_server(parser, f"--expert-policy and {PROCESSOR}, with which any client can run code")
    settings = f"a setting to choose from: {SPELLING} (default: {len(SETTINGS)} of xshare)"
    flag("policies", nargs="*", type=_setting, default=list(SETTINGS), metavar="POLICY", help=settings)
    flag("--texts", type=path, required=True, metavar="DIR", help="*.txt of your own traffic, one kind of text a file")
    tolerance = "the largest rise of cross-entropy over vanilla's to accept, such as 0.5%%"
    flag("--tolerance", type=_share, required=True, metavar="SHARE", help=tolerance)
    flag(
        "--out", type=path, required=True, metavar="DIR", help="for the plan, the report, and the trace to resume from"
    )
    flag("--batches", type=whole(2), nargs="+", default=[16], metavar="N", help="requests that decode together (16)")
    text = f"the most groups of layers, each with its own setting ({GROUPS})"
    flag("--groups", type=whole(), default=GROUPS, metavar="N", help=text)
    flag("--samples", type=whole(2), default=64, metavar="N", help="texts to tune on, and as many held out (64)")
    flag("--prompt", type=whole(), default=64, metavar="N", help="tokens of each that are prefilled (64)")
    flag("--tokens", type=whole(), default=64, metavar="N", help="tokens of each that are decoded (64)")
    parser.set_defaults(run=tune, name="tune")


def tune(arguments: argparse.Namespace) -> int:
    """Search at each batch size, write plan.json and report.json, and restore the policy (see `SwitchGuard`)."""
    client, console = Client(arguments.url, *find_keys(arguments)), open_console()
    guard = SwitchGuard(client)
    limits = guard.before["limits"]
    _check_policies(arguments.policies, limits)
    _check_batch(max(arguments.batches), arguments.prompt, limits["most_rows"], client.ask("/server_info"))
    try_folder("--out", arguments.out)
    # These modules import torch. They are imported here, so other subcommands and refusals do not wait for torch.
    from .gauge import Gauge, pages
    from .measure import Bench, hash_asked
    from .report import describe_found, print_found, summarize
    from .search import ACTIVE, PAGED, count_measurements, search
    from .server import Server

    server = Server(arguments.url, *find_keys(arguments))
    groups = group_layers(limits["moe_layers"], arguments.groups)
    count = max(arguments.samples, *arguments.batches)
    samples = read_samples(arguments.texts, server.tokenize, arguments.prompt, arguments.tokens, count)
    unit = PAGED if pages(guard.before["since_switch"]) else ACTIVE
    gauge = Gauge(server, dict(zip(("tuning", "held out"), samples, strict=True)), guard)
    bench = Bench(gauge, arguments.out / "trace.jsonl", hash_asked(server.get_model(), groups, samples, unit))
    console.print(f"{WARNING}: {ADVICE}", soft_wrap=True)
    console.print(f"At the end tune puts back: {guard}", soft_wrap=True)
    console.print(f"If tune is interrupted, the same command continues from {arguments.out}", soft_wrap=True)
    found: list[Found] = []
    # A lost terminal and a kill also raise KeyboardInterrupt, so the server's policy is restored in these cases.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        for batch in sorted(set(arguments.batches)):
            total = count_measurements(len(groups), len(arguments.policies))
            console.print(f"{batch} rows: about {total} measurements")
            tell = _count(console, bench, total)
            found.append(search(bench, groups, arguments.policies, batch, arguments.tolerance, tell, unit))
            print_found(found[-1], console)
    finally:
        if guard.restore():
            console.print(f"Put back: {guard}", soft_wrap=True)
    plan = join_batches(
        {one.batch: one.chosen.settings if one.chosen else dict.fromkeys(groups, VANILLA_SETTING) for one in found}
    )
    if plan["policy"] != VANILLA_SETTING:
        plan |= {"exact": rule} if (rule := guard.before.get("exact_rule")) else {}  # as on the server
        plan |= {"min_rows": FIRST_SIZE} if unit == PAGED else {}  # steps of one row were not measured
    report = {"policy": dict(plan), "batches": [describe_found(one) for one in found]}
    name, options = plan.pop("policy"), orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    for file, content in (("plan", plan), ("report", report)):
        (arguments.out / f"{file}.json").write_bytes(orjson.dumps(content, option=options))
    lines = [f"Measured {bench.measured} times; report: {arguments.out}/report.json", *map(summarize, found)]
    if name != VANILLA_SETTING:
        lines.append(f"Now: sglang-xshare policy set {arguments.url} {name} --config {arguments.out}/plan.json")
        lines.append(f"Or start with: --expert-policy {name} --expert-policy-config {arguments.out}/plan.json")
    for line in lines:
        console.print(line, soft_wrap=True)
    return 0


def _count(console: Console, bench: Bench, total: int) -> Callable[[str], None]:
    """Return a function that prints a line with the progress of about `total` measurements, and the time left."""
    before, known, begun = len(bench.asked), bench.measured, time.monotonic()

    def tell(line: str) -> None:
        done, measured = len(bench.asked) - before, bench.measured - known
        left = (total - done) * (time.monotonic() - begun) / max(measured, 1)  # known measurements take no time
        rest = f", about {math.ceil(left / 60)} min left" if measured and left > 0 else ""
        console.print(f"{done} of about {total}{rest}: {line}", soft_wrap=True)

    return tell


def _check_policies(policies: Sequence[str], limits: dict[str, Any]) -> None:
    """Raise ValueError if a setting does not fit the server. `limits` is from the answer to GET /expert_policy."""
    for setting in policies:
        try:
            # `limits` lacks the numbers of experts and ranks. These values always pass, and the server checks its own.
            plan, router = _build(setting), Router(**limits["router"])
            plan.check(router, len(plan.order or ()) or router.top_k, ranks=2)
        except ValueError as error:
            raise ValueError(f"POLICY {setting}: {error}") from None


def _check_batch(rows: int, prompt: int, most_rows: int | None, info: dict[str, Any]) -> None:
    """Raise ValueError if the server cannot prefill and decode a batch of `rows` requests of `prompt` tokens.

    `most_rows` is from the answer to GET /expert_policy, and `info` is the answer to GET /server_info.
    """
    if most_rows is not None and rows > most_rows:
        reason = f"must be at most the requests that the server decodes at a time, {most_rows}"
        raise ValueError(f"--batches {rows}: {reason} (--max-running-requests)")
    # SGLang samples a token after each part of a split prompt and discards it, so the logit processor would skip tokens
    # of the text. SGLang counts whole pages, and each rank of data-parallel attention prefills its own requests.
    page, most = info["page_size"] or 1, info["chunked_prefill_size"] or -1
    requests = math.ceil(rows / attention_dp_size(argparse.Namespace(**info)))
    tokens = requests * math.ceil(prompt / page) * page
    if 0 < most < tokens:
        advice = "use smaller --batches, a shorter --prompt, or a server with --chunked-prefill-size -1"
        reason = f"must be at most the server's chunked_prefill_size, {most:,} (got {tokens:,})"
        raise ValueError(f"prompt tokens of a batch {reason}; {advice}")


def _share(text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a share above 0 and below 1, such as 0.5% or 0.005")
    return value


def _build(setting: str) -> SelectionPlan:
    name, keys = parse_policy(setting)
    if name in (VANILLA_SETTING, "observe"):
        raise ValueError(f"policy {setting!r}: must be a policy that selects")
    return build_plan({"policy": name, **keys})


def _setting(text: str) -> str:
    try:
        _build(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
