"""Measure how many page-ins selection saves with paged experts: `python -m benchmark.paged [POLICY...]`.

A model decodes held-out text of mixed domains. Each MoE layer has a fixed number of page slots, and loads experts into
them as SGLang does. Selection prefers the experts that are already loaded. The benchmark also measures the loss.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmark.common.command import Parser, run_main, selecting
from benchmark.common.paths import BUILD
from benchmark.common.variant import BASELINE, parse_variant
from benchmark.paged.report import POLICIES, tabulate_paged
from benchmark.paged.slots import PagedLayer
from benchmark.quality.decoding import add_decoding, read_decoding
from benchmark.quality.measure import Bench, compare_loss
from benchmark.quality.model import Layout, router_of
from benchmark.quality.routing import find_gates
from sglang_xshare import SelectionPlan
from sglang_xshare.policies.baselines import VANILLA
from sglang_xshare.policies.schedule import build_schedule

COUNTS = ("per_domain", "prompt", "steps")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print the table."""
    parser = Parser("benchmark.paged", __doc__)
    parser.add_policies(selecting, POLICIES, "vanilla is always the baseline")
    parser.add_numbers("slots", (32, 16), "slots of a layer")
    parser.add_numbers("batch", (1, 4, 8, 16), "requests of a step")
    parser.add_count("batches", 16, "batches of this many requests, or as many as the text has")
    add_decoding(parser, COUNTS, per_domain=48)
    parser.add_record(BUILD / "paged")
    args = parser.parse_args(argv)
    decoding = read_decoding(args, batch=1, tokens_per_request=1)
    record = parser.open_record("paged", args, argv)
    model, sequences = decoding.load()
    mixed = sequences.mix()
    _check(model, len(mixed), args.slots, args.batch)
    for rows in sorted(args.batch, reverse=True):
        plans = {policy: list_plans(model, policy, rows) for policy in (BASELINE, *args.policies)}
        bench = Bench(model, mixed.take(range(min(args.batches, len(mixed) // rows) * rows)), decoding.prompt)
        for slots in args.slots:
            if all(_name(rows, slots, policy) in record for policy in plans):
                continue
            for policy, point in measure(bench, plans, rows, slots):
                record.add(_name(rows, slots, policy), **point)
    tabulate_paged(record.points).show(record.path)


def list_plans(model: PreTrainedModel, policy: str, rows: int) -> list[SelectionPlan]:
    """Return the plan of each MoE layer. Raises ValueError if a plan does not fit the model."""
    variant, router, layers = parse_variant(policy), router_of(model), range(len(find_gates(model)))
    schedule = build_schedule(variant.policy or BASELINE, dict(variant.keys), speculative=False)
    if schedule is None:
        return [VANILLA for _ in layers]
    for plan in schedule.plans(layers):
        plan.check(*router)
    return [schedule.plan(layer, rows) or VANILLA for layer in layers]


def measure(
    bench: Bench, plans: Mapping[str, Sequence[SelectionPlan]], rows: int, slots: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure each policy, and yield the policy and the fields of its point. The first policy is the baseline."""
    baseline: torch.Tensor | None = None
    for policy, own in plans.items():
        layers = [PagedLayer(slots) for _ in own]
        decoded = bench.run(own, Layout(rows), selects=layers)
        baseline = decoded.nats if baseline is None else baseline
        loss = compare_loss(decoded.nats, baseline, batch=rows)
        page_ins, before = (
            fmean(chain.from_iterable(counts))
            for counts in ((one.page_ins for one in layers), (one.page_ins_before for one in layers))
        )
        print(f"{rows} rows, {slots} slots, {policy}: {page_ins:.1f} page-ins, {loss} nats", flush=True)
        point = {"rows": rows, "slots": slots, "policy": policy}
        counted = {"page_ins": page_ins, "page_ins_before": before, "active_experts": decoded.active}
        yield policy, point | counted | {"kept_mass": decoded.kept_mass, "loss": asdict(loss)}


def _check(model: PreTrainedModel, sequences: int, slots: Sequence[int], rows: Sequence[int]) -> None:
    router, num_experts = router_of(model)
    for count in slots:
        if not router.top_k <= count <= num_experts:
            raise ValueError(f"--slots must be the model's top-k, {router.top_k}, to {num_experts} (got {count})")
    for count in rows:
        if count > sequences:
            raise ValueError(f"--batch must be at most the text's {sequences} sequences (got {count})")


def _name(rows: int, slots: int, policy: str) -> str:
    return f"{rows} rows, {slots} slots, {policy}"


if __name__ == "__main__":
    run_main("paged", main)
