"""The quality of many policies on the same held-out text."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmark.common.variant import BASELINE, parse_plan
from benchmark.quality.decoding import Decoding
from benchmark.quality.measure import TOP, Bench, Decoded, agreement, compare_loss, compare_top
from benchmark.quality.model import router_of


def policy_quality(decoding: Decoding, policies: Sequence[str], top: int = TOP) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure the policies one after another, and yield (policy, results) for each one.

    All policies are compared with vanilla, which is always measured first. The results are a dict with two entries:
    `one_domain` for batches of one domain, and `mixed` for batches of all domains. Each entry contains:

    - `active_experts`: the mean number of active experts per layer and step.
    - `kept_mass`: the mean share of the gating mass that the policy keeps.
    - `layers`: `active_experts` and `kept_mass` of each layer.
    - `agreement`: the share of tokens whose most likely token is the same as vanilla's.
    - `divergence`: the divergence from vanilla, computed from the `top` likeliest tokens.
    - `answers_right` and `answers`: the number of right answers and of all answers to arithmetic problems.
    - `accepted`: the tokens per verify step, if a step has several tokens per request.
    - `loss`: the fields of `Loss`, for `all` text and for each domain.

    Raises ValueError before the first measurement if a policy, the model or the text cannot be used.
    """
    plans = {text: parse_plan(text, decoding.layout.rows) for text in dict.fromkeys([BASELINE, *policies])}
    model, sequences = decoding.load()
    for plan in plans.values():
        plan.check(*router_of(model))
    batches = {"one_domain": sequences, "mixed": sequences.mix()}
    benches = {name: Bench(model, chosen, decoding.prompt) for name, chosen in batches.items()}
    vanilla: dict[str, Decoded] = {}
    for text, plan in plans.items():
        found = {name: bench.run(plan, decoding.layout, top) for name, bench in benches.items()}
        vanilla = vanilla or found
        figures = {name: summarize(decoded, vanilla[name], batches[name].domains) for name, decoded in found.items()}
        report_figures(text, figures)
        yield text, figures


def report_figures(text: str, figures: dict[str, Any]) -> None:
    """Print one line of progress."""
    mixed = figures["mixed"]
    print(f"{text}: {mixed['active_experts']:.1f} experts, {mixed['loss']['all']['delta']:+.4f} nats", flush=True)


def summarize(decoded: Decoded, vanilla: Decoded, domains: Sequence[str]) -> dict[str, Any]:
    """Return the results of one policy, as `policy_quality` describes. `domains` names the domain of each sequence."""
    more: dict[str, Any] = {}
    if decoded.top is not None and vanilla.top is not None:
        more["divergence"] = compare_top(decoded.top, vanilla.top, decoded.layout.batch)
    if decoded.layout.tokens_per_request > 1:
        more["accepted"] = decoded.accepted
    routed = zip(decoded.routing.active, decoded.routing.kept_mass, strict=True)
    layers = [{"active_experts": one.mean().item(), "kept_mass": mass.mean().item()} for one, mass in routed]
    return {
        "active_experts": decoded.active,
        "kept_mass": decoded.kept_mass,
        "layers": layers,
        "agreement": agreement(decoded, vanilla),
        **more,
        "answers_right": int(decoded.answers.sum()),
        "answers": len(decoded.answers),
        "loss": compare_domains(decoded.nats, vanilla.nats, domains, decoded.layout.batch),
    }


def compare_domains(
    nats: torch.Tensor, reference: torch.Tensor, domains: Sequence[str], batch: int
) -> dict[str, dict[str, Any]]:
    """Return the fields of `Loss` for `all` sequences and for each domain. `nats` has the shape [sequences, tokens]."""
    parts = {"all": torch.ones(len(domains), dtype=torch.bool)}
    parts |= {domain: torch.tensor([one == domain for one in domains]) for domain in sorted(set(domains))}
    return {
        name: asdict(compare_loss(nats, reference, rows[:, None].expand_as(nats), batch))
        for name, rows in parts.items()
    }
