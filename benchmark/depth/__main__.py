"""Measure which draft depth is fastest at each batch size: `python -m benchmark.depth [POLICY...]`.

For each policy, several servers run at the same time:

- a server without draft tokens,
- servers with 1, 3, 5 and 7 draft tokens,
- a server that chooses the depth with SGLang's own rule,
- a server that chooses the depth by tokens per second.

SGLang's bench_serving measures the servers in turns. The number of concurrent requests varies. Servers that choose the
depth first run enough steps to find it.
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
"""The number of warm-up batches for servers that choose the depth. They correspond to about 300 verify steps."""
LEAST = 8
"""The minimum number of requests in a round. Two requests, one at a time, would take only 3 seconds."""
PROMPT = 8
"""The length of a prompt in the warm-up, in tokens."""
LOG = ("--decode-log-interval", "8")
"""SGLang updates the accepted length with each decode log line. The default interval is too long for a short run."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark, print the table and draw the picture."""
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
    """Return one variant for each server of a policy.

    The first variants have the fixed depths. Depth 0 means no draft model. The last two variants choose the depth:
    first with SGLang's own rule, then by tokens per second. The function writes a file with the candidate depths to the
    folder `scratch`.
    """
    one = parse_variant(text)
    drafts = {depth: speculative_flags(draft, 1, depth, depth + 1) for depth in fixed if depth}
    variants = [Variant(name_of(text, depth), one.policy, one.keys, (*drafts.get(depth, ()), *LOG)) for depth in fixed]
    start = list(drafts)[len(drafts) // 2]
    scratch.mkdir(parents=True, exist_ok=True)
    candidates = scratch / "candidates.json"
    candidates.write_text(json.dumps({"1": {"candidate_steps": list(drafts)}}) + "\n")
    for name, more in (
        # Without a file of candidates, SGLang's rule uses SGLang's own candidates.
        (UPSTREAM, ("--expert-policy-draft-depth", "upstream")),
        (THROUGHPUT, ("--speculative-adaptive-config", str(candidates), "--expert-policy-draft-depth", "throughput")),
    ):
        flags = (*drafts[start], *LOG, "--speculative-adaptive", *more)
        variants.append(Variant(name_of(text, name), one.policy, one.keys, flags))
    return variants


def settle(servers: Mapping[str, Server], workload: Workload, batches: int) -> None:
    """Warm up the servers with the same kind of traffic that is measured afterwards.

    A server with a fixed depth decodes one batch. A server that chooses its depth decodes `batches` batches. The keys
    of `servers` are the names of the variants.
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
