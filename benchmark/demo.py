"""Serve checkpoints with the expert policy off and on, drive both with upstream's bench_serving, print what it changed.

The small trained checkpoint shows what a policy costs in quality; on the larger generated one loading experts dominates
a step, as on a GPU, and it shows what a policy gains in speed. Results go to build/demo/.
"""

import sys
import time

from benchmark.common.paths import BUILD, DRAFT, LARGE, TEXTS, TRAINED
from benchmark.common.rounds import Workload, run_rounds, serve
from benchmark.common.server import Server, one_line_errors
from benchmark.common.speculative import speculative_flags
from benchmark.common.variant import Variant
from benchmark.quality.served import SERVER_ARGS, measure_nats, measure_sums
from benchmark.quality.text import load_sequences
from benchmark.serving.report import Comparison, describe_workload, print_table, write_plot, write_record

RESULTS = BUILD / "demo"
REQUESTS = 16  # a round: one full batch

OFF = Variant("off", None, {})
XSHARE = Variant("xshare k0=1 add=24", "xshare", {"k0": 1, "add": 24})
EAGLE3 = Variant(
    "xshare, EAGLE-3",
    "xshare",
    {},  # with speculation the default is the published (k0, add, add_per_request) = (1, 0, 4)
    speculative_flags(DRAFT),
)

# What of the held-out text the served cross-entropy is taken over.
PER_DOMAIN, PROMPT, STEPS = 16, 32, 64


def main() -> None:
    """Run both acts and print the table."""
    began = time.monotonic()
    comparisons = [show_quality(), show_speed()]
    title = f"SGLang with expert policy off and on: {describe_workload(comparisons[0].workload)}"
    print_table(title, comparisons)
    write_record(RESULTS / "demo.json", sys.argv, comparisons)
    write_plot(RESULTS / "demo.png", title, comparisons)
    print("Loss: nats a token of held-out text, decoded by the server. Sums right: share of arithmetic problems.")
    print(f"Record: {RESULTS / 'demo.json'}, plot: {RESULTS / 'demo.png'}; {time.monotonic() - began:.0f} s")


def show_quality() -> Comparison:
    """The trained checkpoint: off, the policy, and the policy with speculation."""
    print(f"1/2: {TRAINED.name}, 64 experts, top-8, trained", flush=True)
    workload = Workload(TRAINED, TEXTS, requests=REQUESTS)
    variants = [OFF, XSHARE, EAGLE3]
    with serve(TRAINED, variants, SERVER_ARGS) as servers:
        series = run_rounds(workload, variants, servers)
        losses: list[float | None] = [
            None if "--speculative-algorithm" in variant.args else served_loss(server)
            for variant, server in zip(variants, servers, strict=True)
        ]
        return Comparison(
            workload, series, {"loss": losses, "sums right": [measure_sums(server, TEXTS) for server in servers]}
        )


def show_speed() -> Comparison:
    """The larger checkpoint: off and the policy."""
    print(f"2/2: {LARGE.name}, 128 experts, top-8, random weights", flush=True)
    workload = Workload(LARGE, TEXTS, requests=REQUESTS)
    variants = [OFF, XSHARE]
    with serve(LARGE, variants) as servers:
        return Comparison(workload, run_rounds(workload, variants, servers))


def served_loss(server: Server) -> float:
    """Cross-entropy in nats a token, over every domain of the held-out text."""
    tokens = load_sequences(TEXTS, TRAINED, PROMPT + STEPS, PER_DOMAIN).tokens
    mixed = tokens.unflatten(0, (-1, PER_DOMAIN)).transpose(0, 1).flatten(0, 1)  # every batch holds all domains
    return measure_nats(server, mixed, PROMPT, batch=16).mean().item()


if __name__ == "__main__":
    with one_line_errors("demo"):
        main()
