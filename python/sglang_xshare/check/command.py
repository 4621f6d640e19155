"""The subcommand: its flags, its exit code."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import spell_bytes
from ..gpus import GPUS, NVIDIA, Gpu, find_gpu
from ..parser import read_count, read_number
from ..patching.tree import PatchError
from ..upstream.server import resolved
from .estimate import Asked, check_asked, count_captured, estimate, find_link, read_compared, read_served
from .loads import read_trace
from .server import FLAGS, ServerFlags, read_flags
from .weights import Incomplete, Uncounted, Weights, count_cache, describe_memory, describe_weights, read_weights

if TYPE_CHECKING:
    from .resolve import Resolution

DESCRIPTION = "before a server starts: would it be served, does it fit the GPU, what would policies gain there"
EPILOG = """All other flags are the server's own: --expert-policy, --tp, --mem-fraction-static and the rest. Weights are
not needed, a config.json is; nothing is downloaded or started. Exit code: 0 where the server would be served, 1 where
it would be refused or does not fit, or where something that was asked could not be answered."""
CONTEXT = 1024
"""Tokens cached a request where nobody says."""
DEFAULT = "xshare"
"""Compared where nobody names a policy."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `check`, which passes unknown flags on to SGLang."""
    usage = (
        "sglang-xshare check --model DIR [--gpu NAME] [--batch N [--context N] [--compare POLICY]... "
        "[--active BEFORE AFTER | --trace FILE]] [--json] [flags of the server]"
    )
    parser = subparsers.add_parser(
        "check", help=DESCRIPTION, description=DESCRIPTION, epilog=EPILOG, usage=usage, allow_abbrev=False
    )
    add = parser.add_argument
    add("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)} (default: resolve for this machine, no memory)")
    add("--bandwidth", metavar="GB/s", help="of the memory, in place of that GPU's peak")
    add("--batch", metavar="N", help="estimate a step in which so many requests decode together")
    add("--context", metavar="TOKENS", help=f"cached a request (default: {CONTEXT:,})")
    compared = f"beside the server's --expert-policy, such as oea:k0=3, as often as you like (default: {DEFAULT} alone)"
    add("--compare", metavar="POLICY", action="append", default=[], help=compared)
    known = "active experts a layer and step, as you know them of one policy; with --ep-size the fullest rank's"
    add("--active", nargs=2, metavar=("BEFORE", "AFTER"), help=known)
    add("--trace", type=Path, metavar="FILE", help="active experts of a file of --expert-policy-trace")
    add("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run, name="check", server_flags=[])


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Returns 0 where the server would be served and all that was asked is answered, else 1."""
    from .table import print_table

    report = check(arguments.server_flags, arguments)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print_table(report)
    for reason in report["not_answered"]:
        print(f"check: not answered: {reason}", file=sys.stderr)
    return 0 if report["verdict"] == "served" and not report["not_answered"] else 1


def check(given: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """The report for a server's flags and the subcommand's own, as JSON would have it. Raises ValueError, one line,
    where there is nothing to report on: a wrong value, no configuration, flags that SGLang's parser does not take.
    """
    gpu = find_gpu(options.gpu) if options.gpu else None
    bandwidth = gpu.bandwidth if gpu else None
    if options.bandwidth is not None:
        bandwidth = read_number("--bandwidth", options.bandwidth, 0.001)
    flags, asked = read_flags(given), _read_asked(options)
    if flags.model is None:
        raise ValueError("--model: missing; allowed is a folder that has a config.json, or a model that is cached")
    unanswered: list[str] = []
    given = _on_device(given, flags, gpu)
    # SGLang and huggingface_hub read it when they are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    weights = _read_weights(flags.model, given, unanswered, asks=bool(gpu or asked))
    if weights is not None:
        flags = _fit_slots(flags, weights)
        if asked is not None:
            _check_ranks(weights, flags)
            asked.schedules = {text: read_compared(text, weights, asked, flags) for text in options.compare}
            check_asked(asked, weights, flags)
    report, resolution = _judge(given, gpu, options.gpu, unanswered)
    for text in flags.dropped:
        says = f"--expert-policy {text}: a server runs the last one, {flags.policy}; --compare {text} compares it"
        report.setdefault("warnings", []).append({"by": "sglang-xshare", "says": says})
    for text, schedule in asked.schedules.items() if asked else ():
        lines = [f"--compare {text}: {warning}" for warning in schedule.warnings]
        report["warnings"] = report.get("warnings", []) + [{"by": "sglang-xshare", "says": line} for line in lines]
    if resolution is not None and resolution.finished:
        flags = flags.resolve(resolved(resolution.server_args))
    fits = True
    if weights is not None:
        _check_ranks(weights, flags)
        report["weights"] = describe_weights(weights, flags)
        if gpu is not None:
            cached = asked.count_cached(flags) if asked else 0
            report["memory"] = describe_memory(weights, flags, gpu, cached)
            fits = report["memory"]["fits"]
            bandwidth = _check_step(report["memory"], asked, weights, flags, bandwidth, unanswered)
        if asked is not None:
            if not asked.schedules and _compares_default(asked, flags):
                asked.schedules = {DEFAULT: read_compared(DEFAULT, weights, asked, flags)}
            refused = bool(report.get("refusals"))
            report["estimate"] = _estimate(asked, weights, flags, (bandwidth, find_link(gpu)), unanswered, refused)
            if flags.slots is not None:
                alone = {"without a policy": max(1, flags.slots // weights.model.top_k)}
                captured = {text: count_captured(one, weights, flags.slots) for text, one in asked.schedules.items()}
                report["paging"] = {"slots": flags.slots, "captured": alone | captured}
    verdict = {True: "served", False: "refused", None: "not checked"}[report.get("served")]
    if verdict == "served" and weights is None and unanswered:
        verdict = "not checked"
    is_elsewhere = flags.offloaded or (flags.paged and flags.slots is None)
    if not fits and not is_elsewhere and verdict != "refused":
        verdict = "does not fit"
    if verdict == "served":
        more = [] if flags.policy else ["--expert-policy", DEFAULT]
        if not more or _judge([*given, *more], gpu, options.gpu, [])[0].get("served"):
            engine = ["SGLANG_USE_CPU_ENGINE=1"] * (report.get("device") == "cpu")
            report["start"] = shlex.join([*engine, "sglang", "serve", *options.server_flags, *more])
    return report | {"verdict": verdict, "served": verdict == "served", "not_answered": unanswered}


def _fit_slots(flags: ServerFlags, weights: Weights) -> ServerFlags:
    """The flags with no more slots than experts. Raises ValueError for fewer than a row takes."""
    if flags.slots is None:
        return flags
    if flags.slots < weights.model.top_k:
        allowed = f"allowed is the model's top-k, {weights.model.top_k}, or more"
        raise ValueError(f"--paged-experts-num-resident {flags.slots}: {allowed}")
    return replace(flags, slots=min(flags.slots, weights.model.num_experts))


def _read_asked(options: argparse.Namespace) -> Asked | None:
    """What is to be estimated; None without `--batch`."""
    alone = {"--context": options.context, "--active": options.active, "--trace": options.trace}
    if options.batch is None:
        for flag, value in {**alone, "--compare": options.compare or None}.items():
            if value is not None:
                raise ValueError(f"{flag} without --batch: allowed is --batch N beside it")
        return None
    if options.active is not None and options.trace is not None:
        raise ValueError("--active with --trace: allowed is one of the two")
    context = CONTEXT if options.context is None else read_count("--context", options.context, 0)
    active = [read_number("--active", text, 1) for text in options.active or ()]
    batch = read_count("--batch", options.batch, 1)
    trace = read_trace(options.trace) if options.trace else None
    return Asked(batch, context, active=(active[0], active[1]) if active else None, trace=trace)


def _compares_default(asked: Asked, flags: ServerFlags) -> bool:
    """Not where a policy is named, in a step that `DEFAULT` leaves alone, or whose active experts are given."""
    is_drawn = asked.active is None and asked.trace is None
    return is_drawn and not flags.policy and (flags.paged or asked.batch * flags.draft_tokens > 1)


def _on_device(given: Sequence[str], flags: ServerFlags, gpu: Gpu | None) -> list[str]:
    """The flags with `--device cuda` where a GPU is asked for and none is at hand. Raises ValueError for another."""
    if gpu is None or flags.device == "cuda":
        return list(given)
    if flags.device is not None:
        raise ValueError(f"--device {flags.device} with --gpu: allowed is cuda, or either alone")
    return [*given, "--device", "cuda"]


def _read_weights(model: str, given: Sequence[str], unanswered: list[str], asks: bool) -> Weights | None:
    """None where they cannot be told, which is noted if anything `asks` for them. Raises ValueError for a --model
    without config.json, in its folder or in Hugging Face's cache; of a configuration file's model SGLang's checks say
    it.
    """
    folder = Path(model)
    if not (folder / "config.json").is_file():
        cached = None if folder.exists() else _find_cached(model)
        if cached is None:
            if not any(text.partition("=")[0] in FLAGS["model"] for text in given):
                return None
            reason = "no config.json; allowed is a folder that has one, or a model that is cached"
            raise ValueError(f"--model {model}: {reason}")
        folder = cached
    try:
        return read_weights(folder)
    except Uncounted as error:
        if asks or isinstance(error, Incomplete):
            unanswered.append(f"weights and what depends on them: {error}")
        return None


def _find_cached(model: str) -> Path | None:
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _check_ranks(weights: Weights, flags: ServerFlags) -> None:
    experts = weights.model.num_experts + flags.redundant
    if experts % flags.ep_size:
        raise ValueError(f"--ep-size {flags.ep_size}: allowed is a divisor of the {experts} experts")


def _judge(
    given: Sequence[str], gpu: Gpu | None, name: str | None, unanswered: list[str]
) -> tuple[dict[str, Any], Resolution | None]:
    """What SGLang and its checks say, or why nothing. Raises ValueError for flags that SGLang does not take."""
    from ..patching.engine import check_patched
    from ..patching.tree import find_tree
    from .pretend import CannotPretend

    report: dict[str, Any] = {"sglang": None, "gpu": name}
    try:
        check_patched()
        if gpu and gpu.capability is None:
            nvidia = ", ".join(NVIDIA)
            raise CannotPretend(
                f"--gpu {name}: SGLang decides for AMD's GPUs when it is imported; allowed is {nvidia}, or none"
            )
        from .resolve import describe, resolve

        resolution = resolve(given, gpu)
        return report | {"sglang": find_tree(None).release, **describe(resolution)}, resolution
    except (CannotPretend, PatchError) as error:
        unanswered.append(f"whether it would be served: {error}")
    except ModuleNotFoundError as error:
        unanswered.append(f"whether it would be served: it needs {error.name}, which is not installed here")
    return report, None


def _check_step(
    memory: dict[str, Any],
    asked: Asked | None,
    weights: Weights,
    flags: ServerFlags,
    bandwidth: float | None,
    unanswered: list[str],
) -> float | None:
    """The bandwidth, or None where the step cannot be on that GPU, which is then noted."""
    if asked is None:
        return bandwidth
    if not memory["fits"]:
        elsewhere = flags.offloaded or (flags.paged and flags.slots is None)
        why = "experts that are paged in come from another memory" if elsewhere else "the weights do not fit"
        unanswered.append(f"the time of a step: {why}")
        return None
    needed = asked.count_cached(flags) * count_cache(weights, flags)
    if needed > memory["left_bytes"]:
        asks = f"--batch {asked.batch} with --context {asked.context:,}"
        allowed = f"left are {spell_bytes(memory['left_bytes'])}, {memory['cache_tokens']:,} tokens"
        unanswered.append(f"the time of a step: {asks} takes {spell_bytes(needed)} of KV cache on a GPU; {allowed}")
        return None
    return bandwidth


def _estimate(
    asked: Asked,
    weights: Weights,
    flags: ServerFlags,
    rates: tuple[float | None, float],
    unanswered: list[str],
    refused: bool,
) -> dict[str, Any] | None:
    """The estimate at `rates` of memory and link; None where active experts cannot be told, which is then noted."""
    try:
        schedule = read_served(weights, asked, flags)
        if schedule is not None:
            text = " ".join(filter(None, (flags.policy, flags.policy_config)))
            asked.schedules = {text: schedule, **asked.schedules}
    except ValueError as error:
        if not refused:  # which says it
            unanswered.append(str(error))
    check_asked(asked, weights, flags)
    try:
        return estimate(asked, weights, flags, *rates)
    except ModuleNotFoundError as error:
        unanswered.append(f"active experts: to draw them needs {error.name}; allowed without it: --active, --trace")
        return None
