"""lm-evaluation-harness with the expert policy off and on: `python -m benchmark.evaluation gsm8k --url URL`.

Tasks that generate, by their names in the harness or as YAML files, through the API of one server whose policy is
switched between passes. Without --url a server of --model is started for it.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from benchmark.common.command import Parser, folder, one_line_errors, policy, positive
from benchmark.common.paths import BUILD, TRAINED
from benchmark.common.server import Server
from benchmark.common.variant import BASELINE, OFF, SPELLING, parse_variant
from benchmark.evaluation.arms import post_body, run_arm
from benchmark.evaluation.harness import Endpoint, Harness
from benchmark.evaluation.report import tabulate_evaluation
from sglang_xshare.live.command import ask
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.tune.server import Server as RunningServer

LOCAL = "arithmetic_domain"
POLICIES = (OFF, "xshare:k0=1,add=24")
KEY = "SGLANG_API_KEY"
WARM_UP_TOKENS = 8


def main(argv: Sequence[str] | None = None) -> None:
    """Run what the record lacks, print the table."""
    parser = Parser("benchmark.evaluation", __doc__)
    parser.add_argument(
        "tasks", nargs="*", metavar="TASK", default=[LOCAL], help=f"(default: {LOCAL}, of this project)"
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        type=policy,
        default=POLICIES,
        help=f"{SPELLING}; the first is the baseline (default: {' '.join(POLICIES)})",
    )
    help = f"of a running server that was started with a policy: see docs/live.md; its admin or API key in {KEY}"
    parser.add_argument("--url", help=help)
    parser.add_argument(
        "--model", type=folder, default=TRAINED, help="what to serve without --url (default: %(default)s)"
    )
    parser.add_count("concurrency", 16, "requests at a time")
    parser.add_argument("--limit", type=positive, metavar="N", help="documents a task (default: all)")
    parser.add_argument("--shots", type=int, metavar="N", help="examples before each document (default: the task's)")
    parser.add_argument("--chat", action="store_true", help="by the model's chat template")
    parser.add_record(BUILD / "evaluation")
    args = parser.parse_args(argv)
    harness = Harness(args.tasks)
    arms = [(task, one) for task in args.tasks for one in dict.fromkeys(args.policies)]
    record = parser.open_record("evaluation", args, argv)
    missing = [(task, one) for task, one in arms if _name(task, one) not in record]
    if missing:
        with connect(args) as endpoint:
            for task, one in missing:
                print(f"{_name(task, one)} ...", flush=True)
                arm = run_arm(harness, endpoint, task, one, args.limit, args.shots)
                record.add(_name(task, one), **asdict(arm))
    tabulate_evaluation(record.points).show()
    print(f"Record: {record.path}")


@contextmanager
def connect(args: argparse.Namespace) -> Iterator[Endpoint]:
    """A server that takes every policy, and has the one it had before in the end. Raises `PolicyError` or ValueError in
    one line where there is none.
    """
    if args.url is None:
        with Server(args.model, _start_flags(args.policies), name="evaluation") as server:
            # The first batch at the full concurrency takes longer than others.
            server.generate([[1, 2, 3]] * args.concurrency, max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
            yield Endpoint(server.url, str(args.model), args.concurrency, args.chat)
        return
    url = args.url.rstrip("/")
    key = os.environ.get(KEY)
    before = ask(url, None, key)
    try:
        model = RunningServer(url, key).get_model()
        yield Endpoint(url, model, args.concurrency, args.chat, key)
    finally:
        ask(url, before, key)


def _start_flags(policies: Sequence[str]) -> list[str]:
    """With the first policy that selects, whose keys CUDA graphs capture. Raises ValueError for a wrong one."""
    for one in policies:
        body = post_body(one)
        build_schedule(body.pop("policy"), body, False)
    selecting = [one for one in policies if parse_variant(one).policy not in (None, BASELINE)]
    return ["--expert-policy", selecting[0] if selecting else "observe"]


def _name(task: str, policy: str) -> str:
    return f"{task}, {policy}"


if __name__ == "__main__":
    with one_line_errors("evaluation"):
        main()
