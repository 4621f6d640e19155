"""Many policies on the same held-out text, in batches of one domain and in mixed ones."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmark.common.variant import BASELINE, parse_plan
from benchmark.quality.decoding import Decoding
from benchmark.quality.measure import Bench, Decoded, agreement, compare_loss
from benchmark.quality.model import router_of
from benchmark.quality.text import Sequences


def policy_quality(decoding: Decoding, policies: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What each policy costs against vanilla, which always comes first: (policy, figures), as they are measured.

    Under `one_domain` and `mixed` (how batches are made up) lie `active_experts` a layer and step, `kept_mass`,
    `agreement` (share of greedy tokens equal to vanilla's), `answers_right` of the arithmetic `answers`, and `loss`: of
    `all` text and of each domain, the fields of `Loss`.

    Raises ValueError for a policy, a model or a text that will not do, before anything is measured.
    """
    plans = {text: parse_plan(text, decoding.tokens_per_request > 1) for text in dict.fromkeys([BASELINE, *policies])}
    model, sequences = decoding.load()
    for plan in plans.values():
        plan.check(*router_of(model))
    batches = {"one_domain": sequences, "mixed": sequences.take(sequences.mixing())}
    benches = {name: Bench(model, chosen, decoding.prompt) for name, chosen in batches.items()}
    vanilla: dict[str, Decoded] = {}
    for text, plan in plans.items():
        found = {name: bench.run(plan, decoding.layout) for name, bench in benches.items()}
        vanilla = vanilla or found
        figures = {name: summarize(decoded, vanilla[name], batches[name]) for name, decoded in found.items()}
        told = figures["mixed"]
        print(f"{text}: {told['active_experts']:.1f} experts, {told['loss']['all']['delta']:+.4f} nats", flush=True)
        yield text, figures


def summarize(decoded: Decoded, vanilla: Decoded, sequences: Sequences) -> dict[str, Any]:
    """The figures of one policy on one set of batches, as `policy_quality` documents them."""
    everything = torch.ones(len(sequences), dtype=torch.bool)
    parts = {"all": everything} | {domain: sequences.of_domain(domain) for domain in sorted(set(sequences.domains))}
    losses = {name: compare_loss(decoded.nats[rows], vanilla.nats[rows]) for name, rows in parts.items()}
    return {
        "active_experts": decoded.active,
        "kept_mass": decoded.kept_mass,
        "agreement": agreement(decoded, vanilla),
        "answers_right": int(decoded.answers.sum()),
        "answers": len(decoded.answers),
        "loss": {name: asdict(loss) for name, loss in losses.items()},
    }
