"""Measure paged experts on servers: `python -m benchmark.paged.live [POLICY...]`.

Several servers of one model run at the same time. Some have all experts in memory, and others have page slots for a
part of the experts. They use the model's own routing or a policy. The speed of all servers is measured in turns with
SGLang's bench_serving, and then their loss is measured.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from benchmark.common.command import COUNTS, Parser, run_main, selecting
from benchmark.common.comparison import is_measured, measure
from benchmark.common.evidence import evidence_between, read_settled_totals, read_totals
from benchmark.common.paths import BUILD, TEXTS, WIDENED
from benchmark.common.record import Record
from benchmark.common.rounds import Workload, serve, switch
from benchmark.common.server import Server
from benchmark.common.variant import BASELINE, Variant, parse_variant
from benchmark.common.widened import prepare
from benchmark.paged.report import OBSERVED, UNIFORM, VANILLA, key_of, quality_key, tabulate_live
from benchmark.quality.served import SERVER_ARGS, measure_answers, measure_nats, read_problems
from benchmark.quality.text import load_sequences
from benchmark.serving.measure import PROMPT, add_text

CONCURRENCY = 8, 16
MOST = 1024
"""The number of page slots that stands for all experts. SGLang limits it to the number of experts."""
DEFAULT = UNIFORM[0], UNIFORM[-1]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the table."""
    parser = Parser("benchmark.paged.live", __doc__)
    parser.add_policies(selecting, DEFAULT, "the first also with slots for all experts, beside the same one unpaged")
    parser.add_checkpoint(WIDENED, TEXTS)
    parser.add_count("slots", 32, "experts of a layer that are loaded")
    parser.add_numbers("concurrency", CONCURRENCY, "requests at a time")
    parser.add_counts(COUNTS, "rounds", "requests", "input_tokens", "output_tokens", rounds=4, requests=16)
    add_text(parser, per_domain=8, loss_tokens=48, sums=48)
    parser.add_record(BUILD / "paged")
    args = parser.parse_args(argv)
    record = parser.open_record("live", args, argv)
    counts = {name: getattr(args, name) for name in COUNTS if name != "concurrency"}
    workloads = [Workload(args.model, args.texts, concurrency=rows, **counts) for rows in args.concurrency]
    variants = list_variants(args.policies, args.slots)
    if not all(_is_whole(record, workload, variants) for workload in workloads):
        flags = [*prepare(args.model), *SERVER_ARGS]
        with serve(args.model, variants, flags) as servers:
            for workload in workloads:
                _measure(record, workload, variants, servers, args)
    tabulate_live(record.points).show(record.path)


def list_variants(policies: Sequence[str], slots: int) -> list[Variant]:
    """Return the variants to measure.

    - Vanilla with paged experts, which is the baseline.
    - Vanilla with all experts in memory.
    - Each policy with paged experts.
    - The first policy with all experts in memory, and with page slots for all experts.
    - `observe` with paged experts.
    """
    some, all_of_them = (
        ("--enable-paged-experts", "--paged-experts-num-resident", str(count)) for count in (slots, MOST)
    )
    named = [parse_variant(policy) for policy in policies]
    first = named[0]
    return [
        Variant(VANILLA, None, {}, some),
        Variant(f"{BASELINE}, all in memory", None, {}),
        *(replace(one, args=some) for one in named),
        replace(first, name=f"{first.name}, all in memory"),
        replace(first, name=f"{first.name}, slots for all", args=all_of_them),
        Variant(OBSERVED, "observe", {}, some),
    ]


def _measure(
    record: Record, workload: Workload, variants: Sequence[Variant], servers: Sequence[Server], args: argparse.Namespace
) -> None:
    """Measure the rounds and the quality of the servers, except what the record already contains."""
    key = key_of(workload.concurrency)
    if not is_measured(record, key):
        measure(record, key, workload, variants[:-1], servers[:-1])
    length = PROMPT + args.loss_tokens + 1
    sequences = load_sequences(workload.texts, workload.model, length, args.per_domain, args.skip).mix()
    problems = read_problems(workload.texts, args.sums)
    for variant, server in zip(variants, servers, strict=True):
        name = quality_key(workload.concurrency, variant.name)
        if variant.name not in _judged(variants) or name in record:
            continue
        switch(server, variant, servers)
        before = read_totals(server)
        nats = measure_nats(server, sequences.tokens, PROMPT, workload.concurrency).mean(1)
        counted = evidence_between(before, read_settled_totals(server))
        sums = measure_answers(server, problems, workload.concurrency) if problems else None
        record.add(name, nats=nats.tolist(), sums=sums, page_ins=counted.page_ins, before=counted.page_ins_before)
        print(f"{workload.concurrency} at a time, {variant.name}: {nats.mean():.3f} nats a token", flush=True)


def _judged(variants: Sequence[Variant]) -> list[str]:
    """Return the names of the variants whose quality is measured.

    These are vanilla with all experts in memory, the policies with paged experts, and `observe`. The variant `observe`
    has the same routing as vanilla with paged experts, and it also counts page-ins.
    """
    first = variants[0]
    return [one.name for one in variants if one == variants[1] or (one.args == first.args and one != first)]


def _is_whole(record: Record, workload: Workload, variants: Sequence[Variant]) -> bool:
    keys = (quality_key(workload.concurrency, name) for name in _judged(variants))
    return is_measured(record, key_of(workload.concurrency)) and all(key in record for key in keys)


if __name__ == "__main__":
    run_main("paged.live", main)
