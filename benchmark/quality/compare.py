"""Many policies on the same held-out text, in batches of one domain and in mixed ones."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmark.common.plan import BASELINE, parse_plan
from benchmark.quality.measure import Bench, Outcome, agreement, compare_loss
from benchmark.quality.model import router_of
from benchmark.quality.text import Sequences
from benchmark.quality.workload import Workload


def policy_quality(workload: Workload, policies: Sequence[str]) -> list[dict[str, Any]]:
    """What each policy costs against vanilla, which always comes first: one record a policy, told as it is measured.

    A record holds `policy` and, under `one_domain` and `mixed` (how batches are made up), `active_experts` a layer and
    step, `kept_mass`, `agreement` (share of greedy tokens equal to vanilla's), `answers_right` of the arithmetic
    `answers`, and `loss`: of `all` text and of each domain, the fields of `Loss`.

    Raises ValueError for a policy, a model or a text that will not do, before anything is measured.
    """
    plans = {text: parse_plan(text, workload.tokens_per_request > 1) for text in dict.fromkeys([BASELINE, *policies])}
    model, sequences = workload.load()
    for plan in plans.values():
        plan.check(*router_of(model))
    batches = {"one_domain": sequences, "mixed": sequences.take(sequences.mixing())}
    benches = {name: Bench(model, chosen, workload.prompt) for name, chosen in batches.items()}
    vanilla: dict[str, Outcome] = {}
    records = []
    for text, plan in plans.items():
        outcomes = {name: bench.run(plan, workload.layout) for name, bench in benches.items()}
        vanilla = vanilla or outcomes
        parts = {name: summarize(outcome, vanilla[name], batches[name]) for name, outcome in outcomes.items()}
        records.append({"policy": text, **parts})
        told = parts["one_domain"]
        print(f"{text}: {told['active_experts']:.1f} experts, {told['loss']['all']['delta']:+.4f} nats", flush=True)
    return records


def summarize(outcome: Outcome, vanilla: Outcome, sequences: Sequences) -> dict[str, Any]:
    """The figures of one policy on one set of batches, as `policy_quality` documents them."""
    everything = torch.ones(len(sequences), dtype=torch.bool)
    parts = {"all": everything} | {domain: sequences.of_domain(domain) for domain in sorted(set(sequences.domains))}
    losses = {name: compare_loss(outcome.nats[rows], vanilla.nats[rows]) for name, rows in parts.items()}
    return {
        "active_experts": outcome.active,
        "kept_mass": outcome.kept_mass,
        "agreement": agreement(outcome, vanilla),
        "answers_right": int(outcome.answers.sum()),
        "answers": len(outcome.answers),
        "loss": {name: asdict(loss) for name, loss in losses.items()},
    }
