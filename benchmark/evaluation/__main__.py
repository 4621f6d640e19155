"""Run lm-evaluation-harness with and without an expert policy: `python -m benchmark.evaluation gsm8k --url URL`.

A task is a name in the harness or a YAML file. Tasks must generate text. All passes use one server, and the policy is
switched between the passes. Without --url, the command starts a server of --model.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmark.common.command import Parser, folder, policy, positive, run_main
from benchmark.common.paths import BUILD, TRAINED
from benchmark.common.server import Server
from benchmark.common.variant import BASELINE, OFF, SPELLING, parse_variant
from benchmark.evaluation.harness import Endpoint, Harness, run_arm
from benchmark.evaluation.report import tabulate_evaluation
from benchmark.quality.instrument import Instrument
from sglang_xshare.live.client import API_KEY
from sglang_xshare.policies.schedule import build_schedule

LOCAL = "arithmetic_domain"
POLICIES = (OFF, "xshare:k0=1,add=24")
WARM_UP_TOKENS = 8


def main(argv: Sequence[str] | None = None) -> None:
    """Run the missing passes and print the table."""
    parser = Parser("benchmark.evaluation", __doc__)
    help = f"(default: {LOCAL}, of this project)"
    parser.add_argument("tasks", nargs="*", metavar="TASK", default=[LOCAL], help=help)
    help = f"{SPELLING}; the first is the baseline (default: {' '.join(POLICIES)})"
    parser.add_argument("--policies", nargs="+", type=policy, default=POLICIES, help=help)
    help = f"of a running server with a policy: see docs/operations.md; its admin or API key in {API_KEY}"
    parser.add_argument("--url", help=help)
    parser.add_argument("--model", type=folder, help=f"checkpoint to serve without --url (default: {TRAINED})")
    parser.add_count("concurrency", 16, "requests at a time")
    parser.add_argument("--limit", type=positive, metavar="N", help="documents a task (default: all)")
    parser.add_argument("--shots", type=int, metavar="N", help="examples before each document (default: the task's)")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template")
    parser.add_record(BUILD / "evaluation")
    args = parser.parse_args(argv)
    args.model = _find_model(args)
    harness = Harness(args.tasks)
    arms = [(task, one) for task in args.tasks for one in dict.fromkeys(args.policies)]
    record = parser.open_record("evaluation", args, argv)
    missing = [(task, one) for task, one in arms if _name(task, one) not in record]
    if missing:
        with connect(args) as endpoint:
            for task, one in missing:
                print(f"{_name(task, one)} ...", flush=True)
                record.add(_name(task, one), **run_arm(harness, endpoint, task, one, args.limit, args.shots))
    tabulate_evaluation(record.points).show(record.path)


@contextmanager
def connect(args: argparse.Namespace) -> Iterator[Endpoint]:
    """Yield a server on which every policy can be activated.

    At the end, a server that was already running gets its previous policy back. Raises `PolicyError` or ValueError if
    the server or a policy cannot be used.
    """
    if args.url is None:
        with Server(args.model, _start_flags(args.policies), name="evaluation") as server:
            _warm_up(Instrument(server.url), args.concurrency)
            yield Endpoint(server.url, str(args.model), args.concurrency, args.chat)
        return
    key = os.environ.get(API_KEY)
    running = Instrument(args.url, key)
    before = running.get_policy()
    _warm_up(running, args.concurrency)
    try:
        yield Endpoint(running.url, args.model, args.concurrency, args.chat, key)
    finally:
        running.set_policy(before)


def _find_model(args: argparse.Namespace) -> Path | str:
    """Return the folder of the model to serve. If --url is given, return the name of the server's model instead."""
    if args.url is None:
        return args.model or TRAINED
    if args.model is not None:
        raise ValueError(f"--model must be used without --url (got {args.model})")
    return Instrument(args.url, os.environ.get(API_KEY)).get_model()


def _warm_up(server: Instrument, concurrency: int) -> None:
    """Send one batch at the full concurrency, because the first batch takes longer than others."""
    server.generate([[1, 2, 3]] * concurrency, WARM_UP_TOKENS)


def _start_flags(policies: Sequence[str]) -> list[str]:
    """Return the flag that starts the server with the first policy that selects experts.

    The CUDA graphs are then captured for this policy. Raises ValueError if a policy cannot be used.
    """
    variants = [parse_variant(one) for one in policies]
    for one in variants:
        build_schedule(one.policy or BASELINE, one.keys, False)
    selecting = [one.name for one in variants if one.policy not in (None, BASELINE)]
    return ["--expert-policy", selecting[0] if selecting else "observe"]


def _name(task: str, policy: str) -> str:
    return f"{task}, {policy}"


if __name__ == "__main__":
    run_main("evaluation", main)
