"""Measure how many drafts pay at each batch size: `python -m benchmark.depth [POLICY...]`.

For each policy, servers of one model stay up side by side: without drafts, with 1, 3, 5 and 7 drafts, with SGLang's own
choice of the depth, and with the depth by tokens per second. All are measured in turns with upstream's bench_serving at
each number of requests at a time, after enough steps to find the depth.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmark.common.command import COUNTS, Parser, folder, policy, run_main
from benchmark.common.comparison import is_measured, measure
from benchmark.common.paths import BUILD, DRAFT, TEXTS, WIDENED
from benchmark.common.plot import draw
from benchmark.common.rounds import Workload, draw_prompts, serve
from benchmark.common.server import Server
from benchmark.common.speculative import speculative_flags
from benchmark.common.variant import OFF, Variant, parse_variant
from benchmark.common.widened import prepare
from benchmark.depth.report import (
    FIXED,
    THROUGHPUT,
    UPSTREAM,
    find_missed,
    key_of,
    name_of,
    plot_depths,
    tabulate_depths,
)

CONCURRENCY = 1, 2, 4, 8, 16
POLICIES = OFF, "xshare"
SETTLED = 16
"""Batches before the first round of a batch size, for servers that choose the depth: some 300 verifications."""
LEAST = 8
"""The fewest requests of a round: two requests, one at a time, would take only 3 seconds."""
PROMPT = 8
"""Tokens of a prompt before the first round."""
LOG = ("--decode-log-interval", "8")
"""SGLang updates the accepted length with its decode log, by default too rarely for a short run."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure into the record, print the table, draw the picture."""
    parser = Parser("benchmark.depth", __doc__)
    parser.add_policies(policy, POLICIES, "each with servers of its own, one policy after another")
    parser.add_checkpoint(WIDENED, TEXTS)
    parser.add_argument("--draft", type=folder, default=DRAFT, help="EAGLE-3 draft (default: the trained model's)")
    parser.add_numbers("concurrency", CONCURRENCY, "requests at a time")
    parser.add_numbers("fixed", FIXED, "fixed depths; 0 has no draft model", int)
    parser.add_counts(COUNTS, "rounds", "input_tokens", "output_tokens", output_tokens=64)
    parser.add_count("waves", 2, f"requests a round, for each that runs at a time; at least {LEAST} in all")
    parser.add_count("settled", SETTLED, "batches before the first round, for servers that choose the depth")
    parser.add_record(BUILD / "depth")
    args = parser.parse_args(argv)
    if 0 not in args.fixed:
        parser.error(f"--fixed must contain 0, the baseline of all depths (got {' '.join(map(str, args.fixed))})")
    record = parser.open_record("depth", args, argv)
    for text in args.policies:
        variants = list_variants(text, args.draft, sorted(args.fixed), record.path.parent)
        workloads = {key_of(text, requests): _make_workload(args, requests) for requests in args.concurrency}
        if all(is_measured(record, key) for key in workloads):
            continue
        with serve(args.model, variants, prepare(args.model)) as servers:
            for key, workload in workloads.items():
                if not is_measured(record, key):
                    named = {one.name: server for one, server in zip(variants, servers, strict=True)}
                    settle(named, workload, args.settled)
                    measure(record, key, workload, variants, servers)
    tabulate_depths(record.points).show(record.path)
    for line in find_missed(record.points):
        print(f"Missed: {line}")
    draw(plot_depths(record.points), record.path.with_suffix(".png"))


def list_variants(text: str, draft: Path, fixed: Sequence[int], scratch: Path) -> list[Variant]:
    """Return the servers of a policy: fixed depths, of which 0 has no draft, then SGLang's choice and ours.

    The file of candidates, the positive depths for all batch sizes, is written to `scratch`.
    """
    one = parse_variant(text)
    drafts = {depth: speculative_flags(draft, 1, depth, depth + 1) for depth in fixed if depth}
    variants = [Variant(name_of(text, depth), one.policy, one.keys, (*drafts.get(depth, ()), *LOG)) for depth in fixed]
    start = list(drafts)[len(drafts) // 2]
    scratch.mkdir(parents=True, exist_ok=True)
    candidates = scratch / "candidates.json"
    candidates.write_text(json.dumps({"1": {"candidate_steps": list(drafts)}}) + "\n")
    for name, more in (
        # Without a file SGLang takes its own candidates, which suit its own rule.
        (UPSTREAM, ("--expert-policy-draft-depth", "upstream")),
        (THROUGHPUT, ("--speculative-adaptive-config", str(candidates), "--expert-policy-draft-depth", "throughput")),
    ):
        flags = (*drafts[start], *LOG, "--speculative-adaptive", *more)
        variants.append(Variant(name_of(text, name), one.policy, one.keys, flags))
    return variants


def settle(servers: Mapping[str, Server], workload: Workload, batches: int) -> None:
    """Decode batches of the workload, by server name: one at a fixed depth, `batches` if the server chooses its depth.

    A server finds its depth in the traffic that is measured afterwards.
    """
    for number in range(batches):
        seed = workload.seed + workload.rounds + number
        prompts = draw_prompts(workload.texts, workload.model, workload.concurrency, PROMPT, seed)
        for name, server in servers.items():
            if number == 0 or name.endswith((UPSTREAM, THROUGHPUT)):
                server.generate(prompts, max_new_tokens=workload.output_tokens, ignore_eos=True)


def _make_workload(args: argparse.Namespace, requests: int) -> Workload:
    counts = {name: getattr(args, name) for name in ("rounds", "input_tokens", "output_tokens")}
    sent = max(args.waves * requests, LEAST)
    return Workload(args.model, args.texts, requests=sent, concurrency=requests, **counts)


if __name__ == "__main__":
    run_main("depth", main)
