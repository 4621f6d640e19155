"""Serve a model with the expert policy off and on, without drafts and with them; print what it gained and cost.

The model is the shipped checkpoint with wider experts and the same function, so that loading experts dominates a step,
as on a GPU. Upstream's bench_serving drives all servers in turns.
"""

import os
import textwrap
import time
from collections.abc import Sequence

from benchmark.common.command import Parser, run_main
from benchmark.common.machine import format_machine
from benchmark.common.paths import BUILD, DRAFT, TEXTS, WIDENED
from benchmark.common.record import last_session
from benchmark.common.speculative import drafting_variant, speculative_flags
from benchmark.common.table import NOTE_WIDTH
from benchmark.common.variant import OFF, parse_variant
from benchmark.serving.measure import add_text, measure_serving
from benchmark.serving.report import tabulate_serving

POLICIES = (OFF, "xshare")
"""Without drafts and with them."""
SEEN = (
    "To be seen: under the policy a layer loads fewer experts, so that a step is faster and more tokens come a second, "
    "without drafts and with them; the loss hardly rises, and the sums stay right."
)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print the table."""
    began = time.monotonic()
    parser = Parser("benchmark.demo", __doc__)
    parser.add_counts(requests=16)  # a round is one full batch
    add_text(parser, per_domain=4)
    parser.add_record(BUILD / "demo")
    args = parser.parse_args(argv)
    record = parser.open_record("demo", args, argv)
    sessions = len(record.content["sessions"])
    plain = [parse_variant(text) for text in POLICIES]
    variants = [*plain, *(drafting_variant(one, speculative_flags(DRAFT)) for one in plain)]
    args.model, args.texts = WIDENED, TEXTS
    measure_serving(record, args, variants)
    load = os.getloadavg()[0]
    tabulate_serving(record.points).show()
    print(f"\n{textwrap.fill(SEEN, NOTE_WIDTH)}\n\nOn {format_machine(last_session(record.content))}.\n")
    is_new = len(record.content["sessions"]) > sessions  # a run that only shows what is recorded adds none
    if is_new and (warning := warn_of_load(load, len(os.sched_getaffinity(0)))):
        print(f"{textwrap.fill(warning, NOTE_WIDTH)}\n")
    print(f"Record: {record.path}; {time.monotonic() - began:.0f} s")


def warn_of_load(load: float, cores: int) -> str:
    """What is to be said of a load average over the last minute; empty where the machine could bear it."""
    if load <= cores:
        return ""
    return (
        f"Warning: load average {load:.1f} on {cores} cores: other work ran beside this, and the ratios are of a busy "
        "machine; measure again on a quiet one."
    )


if __name__ == "__main__":
    run_main("demo", main)
