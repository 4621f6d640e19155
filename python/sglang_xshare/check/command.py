"""The subcommand `check`: its flags, its report and its exit code."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..compatibility.arguments import KEYS, read_arguments, read_config
from ..console import spell_bytes
from ..gpus import GPUS, Gpu, find_gpu
from ..parser import between, whole
from ..patching.tree import NotInstalledError, PatchError
from ..refusal import ExpertPolicyError
from .drafts import list_warnings
from .estimate import Step, estimate
from .executed import ALONE, list_never_executed
from .modules import import_lightly
from .reading import find_folder, read_flagged, read_resolved
from .server import ServerFlags, read_flags
from .weights import Weights, count_cache, count_weights, describe_memory, describe_weights

if TYPE_CHECKING:
    from ..policies.schedule import Schedule
    from .resolve import Resolution

DESCRIPTION = "before a server starts: would it be served, does it fit the GPU, what would policies gain"
EPILOG = """All other flags are the server's own: --expert-policy, --tp, --mem-fraction-static and the rest. The model
needs a config.json and no weights; nothing is downloaded or started. Exit code: 0 if the server would be served, 1 if
it would be refused or does not fit, or if a question could not be answered."""
CONTEXT = 1024
"""The default of --context."""
DEFAULT = "xshare"
"""The policy that `check` uses if no flag names a policy."""
PAGED = "--enable-paged-experts: not checked: SGLang refuses experts that it cannot page when it builds the model"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `check`. The subcommand passes unknown flags to SGLang."""
    usage = (
        "sglang-xshare check --model DIR [--gpu NAME] [--batch N [--context N] [--compare POLICY]... "
        "[--active BEFORE AFTER]] [--json] [flags of the server]"
    )
    parser = subparsers.add_parser(
        "check", help=DESCRIPTION, description=DESCRIPTION, epilog=EPILOG, usage=usage, allow_abbrev=False
    )
    add = parser.add_argument
    gpus = f"one of {', '.join(GPUS)} (default: this machine, without memory)"
    add("--gpu", type=str.lower, metavar="NAME", help=gpus)
    add("--bandwidth", type=between(0.001), metavar="GB/s", help="memory bandwidth (default: the GPU's peak)")
    add("--batch", type=whole(), metavar="N", help="estimate a step of N requests that decode together")
    add("--context", type=whole(0), metavar="TOKENS", help=f"cached tokens a request (default: {CONTEXT:,})")
    compared = "a policy to compare, such as oea:k0=3; may be repeated (default: the server's --expert-policy)"
    add("--compare", metavar="POLICY", action="append", default=[], help=compared)
    known = "measured active experts a layer and step of one policy; with --ep-size the fullest rank's"
    add("--active", type=between(1), nargs=2, metavar=("BEFORE", "AFTER"), help=known)
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, name="check", server_flags=[])


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Return 0 if the server would start and every question has an answer, otherwise return 1."""
    from .table import print_table

    report = check(arguments.server_flags, arguments)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print_table(report)
    for reason in report["not_answered"]:
        print(f"check: not answered: {reason}", file=sys.stderr)
    return 0 if report["served"] and not report["not_answered"] else 1


def check(given: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Return the report as an object for JSON.

    `given` contains the server's flags, and `options` contains the subcommand's flags. Raises ValueError if a value is
    wrong, if there is no config.json, or if SGLang's parser rejects the flags. The error's message is one line.
    """
    gpu = find_gpu(options.gpu) if options.gpu else None
    bandwidth = options.bandwidth or (gpu.bandwidth if gpu else None)
    _check_alone(options)
    given, flags = _name_policy(given, options)
    if flags.model is None:
        raise ValueError("--model: missing; must be a folder with a config.json, or a cached model")
    if options.batch and flags.enable_paged_experts:
        raise ValueError("--batch with --enable-paged-experts: page-ins are not estimated; use one of the two flags")
    unanswered: list[str] = []
    # Set the variable before the imports, because SGLang and huggingface_hub read it when they are imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    folder = find_folder(flags.model, flags.revision)
    report, resolution = _judge(_on_device(given, flags, gpu), flags, gpu, options.gpu, unanswered)
    drafts: list[str] = []
    weights = _count(folder, flags, resolution, unanswered if gpu or options.batch else [])
    if weights is not None:
        experts = weights.model.num_experts + flags.redundant
        if experts % flags.ep_size:
            raise ValueError(f"--ep-size {flags.ep_size}: must be a divisor of the {experts} experts")
        context = CONTEXT if options.context is None else options.context
        active: Any = tuple(options.active) if options.active else None
        step = Step(weights, flags, options.batch, context, active) if options.batch else None
        report["weights"] = describe_weights(weights, flags)
        if gpu is not None:
            report["memory"] = describe_memory(weights, flags, gpu, step.cached if step else 0)
        if step is not None:
            if bandwidth is not None and (reason := _find_obstacle(report.get("memory"), step)):
                unanswered.append(f"the time of a step: {reason}")
                bandwidth = None
            schedule = _read_served(step, report, resolution, unanswered)
            report["estimate"] = _estimate(step, schedule, options.compare, bandwidth, unanswered)
            if report["estimate"] is not None and bandwidth is not None and step.active is None:
                drafts = list_warnings(step, schedule, bandwidth)
    architecture = weights.model.architecture if weights else report.get("model", {}).get("architecture")
    if architecture is not None:
        report["never_executed"] = list_never_executed(flags, architecture, report)
    verdict = _decide(report, flags, unanswered)
    warnings = drafts + [ALONE] * (flags.dp_size > 1) + [PAGED] * (verdict == "served" and flags.enable_paged_experts)
    if warnings:
        own = [{"by": "sglang-xshare", "says": line} for line in warnings]
        report["warnings"] = report.get("warnings", []) + own
    if verdict == "served":
        engine = ["SGLANG_USE_CPU_ENGINE=1"] * (report.get("device") == "cpu")
        # `sglang serve` does not read the model from the file of --config.
        model = [] if flags.names_model else ["--model-path", flags.model]
        report["start"] = shlex.join([*engine, "sglang", "serve", *given, *model])
    return report | {"verdict": verdict, "served": verdict == "served", "not_answered": unanswered}


def _check_alone(options: argparse.Namespace) -> None:
    """Raise ValueError if a flag that describes a step is used without `--batch`."""
    alone = {"--context": options.context, "--active": options.active, "--compare": options.compare or None}
    for flag, value in alone.items():
        if value is not None and options.batch is None:
            raise ValueError(f"{flag} without --batch: must be used with --batch N")


def _name_policy(given: Sequence[str], options: argparse.Namespace) -> tuple[Sequence[str], ServerFlags]:
    """Return the server's flags, as a list and as parsed values.

    If no flag names a policy, the policy `DEFAULT` is added to both. It is not added if the step has only one row, or
    with --active or --mask-padding-experts.
    """
    flags = read_flags(given)
    if flags.names_policy or options.compare or options.active or flags.mask_padding_experts:
        return given, flags
    if options.batch == flags.draft_tokens == 1 and flags.speculative_algorithm is None:
        return given, flags  # a policy does not change a step of one row
    given = [*given, "--expert-policy", DEFAULT]
    return given, read_flags(given)


def _on_device(given: Sequence[str], flags: ServerFlags, gpu: Gpu | None) -> list[str]:
    """Return the server's flags, and `--device cuda` if `--gpu` is set. Raises ValueError for another `--device`."""
    if gpu is None or flags.device == "cuda":
        return list(given)
    if flags.device is not None:
        raise ValueError(f"--device {flags.device} with --gpu: must be cuda, or use one of the two flags")
    return [*given, "--device", "cuda"]


def _judge(
    given: Sequence[str], flags: ServerFlags, gpu: Gpu | None, name: str | None, unanswered: list[str]
) -> tuple[dict[str, Any], Resolution | None]:
    """Check the flags with SGLang. Return the report, and the resolution if SGLang could resolve the flags.

    If SGLang cannot be used, check only the policy's flags. If they are wrong, the report contains the refusal.
    Otherwise add the reason why SGLang cannot be used to `unanswered`. Raises ValueError if SGLang's parser rejects the
    flags.
    """
    from ..patching.engine import check_patched
    from ..patching.tree import find_tree
    from .pretend import CannotPretend, check_gpu

    report: dict[str, Any] = {"sglang": None, "gpu": name}
    try:
        check_patched()
        release = find_tree(None).release
        if gpu:
            check_gpu(gpu, name, release)
        from .resolve import describe, resolve

        resolution = resolve(given, gpu)
        return report | {"sglang": release, **describe(resolution)}, resolution
    except NotInstalledError:  # the error's message names --target, a flag of `patch`
        reason = "SGLang is not installed here"
    except (CannotPretend, PatchError) as error:
        reason = str(error)
    except ModuleNotFoundError as error:
        reason = f"it needs {error.name}, which is not installed here"
    try:
        read_arguments(flags)
    except ExpertPolicyError as error:
        return report | {"served": False, "refusals": [{"by": "sglang-xshare", "says": str(error)}]}, None
    unanswered.append(f"whether it would be served: {reason}")
    return report, None


def _count(folder: Path, flags: ServerFlags, resolution: Resolution | None, unanswered: list[str]) -> Weights | None:
    """Count the weights of the model. If this fails, return None and add the reason to `unanswered`.

    Use the resolved arguments if SGLang could resolve all of them, otherwise the flags.
    """
    start = resolution.start if resolution is not None and resolution.finished else None
    if start is not None:
        flags.resolve(start.config)
    try:
        if resolution is not None and start is not None:
            return count_weights(read_resolved(folder, flags, start, resolution.experts))
        with import_lightly() if resolution is None else nullcontext():
            return count_weights(read_flagged(folder, flags))
    except ValueError as error:
        unanswered.append(f"weights and what depends on them: {error}")
    except ModuleNotFoundError as error:
        unanswered.append(f"weights and what depends on them: they need {error.name}, or the model's safetensors")
    return None


def _find_obstacle(memory: dict[str, Any] | None, step: Step) -> str | None:
    """Return the reason why the step cannot be timed on a GPU with this memory. Return None if it can.

    Without `--gpu` the memory is None.
    """
    if step.flags.offloaded:
        return "offloaded weights come from another memory"
    if memory is None:
        return None
    if not memory["fits"]:
        return "the weights do not fit"
    needed = step.cached * count_cache(step.weights, step.flags)
    if needed <= memory["left_bytes"]:
        return None
    asks = f"--batch {step.batch} with --context {step.context:,}"
    allowed = f"must be at most {spell_bytes(memory['left_bytes'])}, {memory['cache_tokens']:,} tokens"
    return f"{asks} takes {spell_bytes(needed)} of KV cache on a GPU; {allowed}"


def _read_served(
    step: Step, report: dict[str, Any], resolution: Resolution | None, unanswered: list[str]
) -> Schedule | None:
    """Return the schedule of the server's policy.

    Return None if the policy routes as the model does, or if the policy is wrong.

    If the policy is wrong, add the reason to `unanswered`, unless the report already contains the reason.
    """
    policy, config = step.flags.expert_policy, step.flags.expert_policy_config
    if not policy:
        return None
    start = resolution.start if resolution is not None else None
    # The checks have already read the keys. Their file may be a pipe, which is then empty.
    keys = getattr(step.flags if start is None else start.server_args, KEYS, None)
    try:
        return step.read_policy("--expert-policy", policy, read_config(config) if keys is None else keys)
    except ValueError as error:
        if not report.get("refusals"):  # otherwise the refusals contain the reason
            unanswered.append(str(error))
        return None


def _estimate(
    step: Step, schedule: Schedule | None, compared: Sequence[str], bandwidth: float | None, unanswered: list[str]
) -> dict[str, Any] | None:
    """Return the estimate for all policies. If a package is missing, return None and add the reason to `unanswered`."""
    schedules: dict[str, Schedule] = {}
    if schedule is not None:
        given = step.flags.expert_policy, step.flags.expert_policy_config
        schedules[" ".join(filter(None, given))] = schedule
    for text in compared:
        other = step.read_policy("--compare", text, {})
        if other is None:
            raise ValueError(f"--compare {text}: must be a policy that selects; vanilla is always compared")
        schedules[text] = other
    step.check(len(schedules))
    try:
        return estimate(step, schedules, bandwidth)
    except ModuleNotFoundError as error:
        unanswered.append(f"active experts: drawing them needs {error.name}; without it use --active")
        return None


def _decide(report: dict[str, Any], flags: ServerFlags, unanswered: list[str]) -> str:
    """Return the verdict: "served", "refused", "does not fit" or "not checked"."""
    served = report.get("served")
    if served is False:
        return "refused"
    if not report.get("memory", {"fits": True})["fits"] and not flags.offloaded:
        return "does not fit"
    return "served" if served and ("weights" in report or not unanswered) else "not checked"
