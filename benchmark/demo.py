"""Serve checkpoints with the expert policy off and on, drive both with upstream's bench_serving, print what it changed.

The small trained checkpoint shows what a policy costs in quality; on the larger generated one loading experts dominates
a step, as on a GPU, and it shows what a policy gains in speed.
"""

import argparse
import os
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmark.common.command import COUNTS, Parser, one_line_errors
from benchmark.common.comparison import Comparison, format_number, is_measured, measure, tabulate
from benchmark.common.large_model import make
from benchmark.common.paths import BUILD, DRAFT, LARGE, TEXTS, TRAINED
from benchmark.common.plot import plot_speed
from benchmark.common.record import Record
from benchmark.common.rounds import Workload, serve
from benchmark.common.server import Server
from benchmark.common.speculative import drafting_variant, speculative_flags
from benchmark.common.table import NOTE_WIDTH, Table
from benchmark.common.variant import parse_variant

OFF = parse_variant("off")
XSHARE = parse_variant("xshare:k0=1,add=24")
# With speculation the default is the published (k0, add, add_per_request) = (1, 0, 4).
EAGLE3 = drafting_variant(parse_variant("xshare"), speculative_flags(DRAFT))
SPEED, SMALL, QUALITY = "large", "trained", "quality"
"""Keys of the record: the rounds on either model, and what the servers of the trained one lose."""
NOTE = (
    "Accepted: tokens a verification step, the last of them the target's own. Loss: nats a token of held-out text, "
    "decoded by the server. Sums right: share of arithmetic problems."
)
SEEN = (
    f"To be seen: under the policy a layer loads fewer experts, which costs little loss and hardly a sum. {LARGE.name} "
    f"waits for its experts, so that fewer of them are a faster step; {TRAINED.name} is too small to wait for them, so "
    "that a policy gains little or nothing there."
)
PROMPT = 32  # tokens before those whose loss is taken


def main(argv: Sequence[str] | None = None) -> None:
    """Run both acts and print the table."""
    began = time.monotonic()
    parser = Parser("benchmark.demo", __doc__)
    parser.add_counts(requests=16)  # a round is one full batch
    parser.add_count("sums", 160, "arithmetic problems")
    parser.add_count("per_domain", 16, "sequences of each domain whose loss is taken")
    parser.add_count("loss_tokens", 64, "tokens of each sequence whose loss is taken")
    parser.add_record(BUILD / "demo")
    args = parser.parse_args(argv)
    record = parser.open_record("demo", args, argv)
    sessions = len(record.content["sessions"])
    if not is_measured(record, SMALL) or QUALITY not in record:
        show_quality(args, record)
    if not is_measured(record, SPEED):
        show_speed(args, record)
    load = os.getloadavg()[0]
    tabulate_demo(record.points).show()
    print(f"\n{textwrap.fill(SEEN, NOTE_WIDTH)}\n")
    is_new = len(record.content["sessions"]) > sessions  # a run that only shows what is recorded adds none
    if is_new and (warning := warn_of_load(load, len(os.sched_getaffinity(0)))):
        print(f"{textwrap.fill(warning, NOTE_WIDTH)}\n")
    plot = args.out / "demo.png"
    plot_speed(plot, list_comparisons(record.points), "Speed over active experts, expert policy off and on")
    print(f"Record: {record.path}, plot: {plot}; {time.monotonic() - began:.0f} s")


def show_quality(args: argparse.Namespace, record: Record) -> None:
    """The trained checkpoint: off, the policy, and the policy with speculation."""
    from benchmark.quality.served import SERVER_ARGS, measure_sums

    print(f"1/2: {TRAINED.name}, 64 experts, top-8, trained", flush=True)
    variants = [OFF, XSHARE, EAGLE3]
    with serve(TRAINED, variants, SERVER_ARGS) as servers:
        measure(record, SMALL, _workload(args, TRAINED), variants, servers)
        losses = [
            None if variant.args else served_loss(server, args.per_domain, args.loss_tokens)  # no server forces drafts
            for variant, server in zip(variants, servers, strict=True)
        ]
        record.add(QUALITY, losses=losses, sums=[measure_sums(server, TEXTS, args.sums) for server in servers])


def show_speed(args: argparse.Namespace, record: Record) -> None:
    """The larger checkpoint: off and the policy."""
    make()
    print(f"2/2: {LARGE.name}, 128 experts, top-8, random weights", flush=True)
    variants = [OFF, XSHARE]
    with serve(LARGE, variants) as servers:
        measure(record, SPEED, _workload(args, LARGE), variants, servers)


def served_loss(server: Server, per_domain: int, tokens: int) -> float:
    """Cross-entropy in nats a token, over every domain of the held-out text."""
    from benchmark.quality.served import measure_nats
    from benchmark.quality.text import load_sequences

    sequences = load_sequences(TEXTS, TRAINED, PROMPT + tokens, per_domain)
    mixed = sequences.take(sequences.mixing())  # every batch holds all domains
    return measure_nats(server, mixed.tokens, PROMPT, batch=16).mean().item()


def list_comparisons(points: Mapping[str, Any]) -> list[Comparison]:
    """Both acts, what the first costs beside it."""
    columns = {
        "loss": [format_number(loss, 3) for loss in points[QUALITY]["losses"]],
        "sums right": [format_number(share, 3) for share in points[QUALITY]["sums"]],
    }
    return [Comparison.read(points[SMALL], columns), Comparison.read(points[SPEED])]


def tabulate_demo(points: Mapping[str, Any]) -> Table:
    """A row a server, model by model."""
    return tabulate("SGLang with expert policy off and on", list_comparisons(points), NOTE)


def warn_of_load(load: float, cores: int) -> str:
    """What is to be said of a load average over the last minute; empty where the machine could bear it."""
    if load <= cores:
        return ""
    return (
        f"Warning: load average {load:.1f} on {cores} cores: other work ran beside this, and the ratios are of a busy "
        "machine; measure again on a quiet one."
    )


def _workload(args: argparse.Namespace, model: Any) -> Workload:
    return Workload(model, TEXTS, **{name: getattr(args, name) for name in COUNTS})


if __name__ == "__main__":
    with one_line_errors("demo"):
        main()
