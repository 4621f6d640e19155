"""What policies cost on a running server, one policy after another, in the figures of an offline decode."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmark.common.variant import BASELINE, Variant, parse_variant
from benchmark.quality.compare import compare_domains, tell_figures
from benchmark.quality.decoding import Decoding
from benchmark.quality.instrument import Instrument
from benchmark.quality.traffic import Traffic, continue_prompts, read_texts, share_batch
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.tune.gauge import Gauge
from sglang_xshare.tune.measure import Measurement, agreement
from sglang_xshare.tune.texts import Sample

Run = dict[str, tuple[Measurement, dict[str, Any]]]
"""How batches are made up -> what a policy measured there, and figures that only a server has."""


def measure_running(
    server: Instrument, prompts: Path | None, decoding: Decoding, policies: Sequence[str], top: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(policy, figures) as `policy_quality` gives them, but for single layers', vanilla's first; on a file of prompts,
    or else the texts of `decoding`. `answers` are the problems that the server answers freely, `accepted` is the
    accepted length of its own drafts. In the end the server has the policy that it had before, whatever happens.

    Raises `PolicyError` or ValueError in one line.
    """
    draft_tokens = server.get_draft_tokens()
    selecting = [parse_variant(text) for text in dict.fromkeys(policies) if text != BASELINE]
    for variant in selecting:  # all of them before anything is switched
        if variant.policy in (None, "observe"):
            raise ValueError(f"policy {variant.name}: allowed beside {BASELINE} are those that select")
        build_schedule(variant.policy, variant.keys, speculative=draft_tokens > 1)
    if not selecting:
        raise ValueError(f"policies {BASELINE}: allowed is one more, in whose steps {BASELINE}'s experts are counted")
    variants = [parse_variant(BASELINE), *selecting]
    samples: dict[str, Sequence[Sample]] = {}
    gauge = Gauge(server, samples)
    gauge.top, gauge.tokens_per_request = top, draft_tokens

    def go_on(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """What the server's own routing answers, up to an end of text."""
        gauge.guard.set_policy({"policy": BASELINE})
        return [list(one["output_ids"]) for one in server.generate(prompts, tokens, ignore_eos=False)]

    try:
        if prompts is None:
            traffic = read_texts(decoding, server.tokenize)
        else:
            traffic = continue_prompts(prompts, decoding, server.tokenize, go_on)
        batches = {"one_domain": traffic, "mixed": traffic.mix()}
        samples |= {name: one.samples for name, one in batches.items()}
        layers = len(server.get_policy()["limits"]["moe_layers"])
        runs = _run_all(server, gauge, variants, batches, decoding)
        (_, vanilla), (first_name, first) = head = next(runs), next(runs)
        before = {name: measured.before for name, (measured, _) in first.items()}
        for text, found in chain(head, runs):
            figures = {}
            for name, (measured, more) in found.items():
                own = before[name]
                if own is None:
                    reason = f"{first_name} selects in no step of it, in which vanilla's experts would be counted"
                    raise ValueError(f"--batch {decoding.batch}: {reason}; allowed is a size at which it does")
                active = own - (measured.saved or 0.0) / layers
                figures[name] = _describe(measured, vanilla[name][0], active, batches[name].domains) | more
            tell_figures(text, figures)
            yield text, figures
    finally:
        gauge.guard.restore()


def _run_all(
    server: Instrument, gauge: Gauge, variants: Sequence[Variant], batches: Mapping[str, Traffic], decoding: Decoding
) -> Iterator[tuple[str, Run]]:
    """Every policy on both orders of the samples, from an empty cache; one of a single domain has nothing to mix."""
    for variant in variants:
        found: Run = {}
        for name, traffic in batches.items():
            if found and traffic == batches["one_domain"]:
                found[name] = found["one_domain"]
                continue
            server.flush()
            measured = gauge(variant.body(), decoding.batch, name)
            right = _answer(server, traffic, decoding.batch, mixed=name == "mixed")
            more: dict[str, Any] = {"answers_right": sum(right), "answers": len(right)}
            if gauge.tokens_per_request > 1:
                more["accepted"] = _accept(server, traffic, decoding)
            found[name] = measured, more
        yield variant.name, found


def _describe(found: Measurement, vanilla: Measurement, active: float, domains: Sequence[str]) -> dict[str, Any]:
    nats, own = (torch.tensor(one.nats)[:, None] for one in (found, vanilla))
    error = stdev(found.divergences) / len(found.divergences) ** 0.5
    return {
        "active_experts": active,
        "kept_mass": 1.0 if found.kept_mass is None else found.kept_mass,
        "agreement": agreement(found, vanilla),
        "divergence": {"nats": fmean(found.divergences), "error": error},
        "loss": compare_domains(nats, own, domains),
    }


def _answer(server: Instrument, traffic: Traffic, batch: int, mixed: bool) -> list[bool]:
    """Of each problem, whether it is answered right: in batches of problems alone, or among the other domains."""
    server.flush()
    if not traffic.problems:
        return []
    longest = max(len(server.tokenize(one.answer)) for one in traffic.problems) + 1
    own = max(batch // len(set(traffic.domains)), 1) if mixed else batch
    company = [one.prompt for one in (traffic.samples if mixed else traffic.problems)]
    right = []
    for some, prompts in share_batch(traffic.problems, company, own, batch):
        answers = server.generate(prompts, longest)
        pairs = zip(some, answers, strict=False)
        right += [answer["text"].lstrip().startswith(one.answer.lstrip()) for one, answer in pairs]
    return right


def _accept(server: Instrument, traffic: Traffic, decoding: Decoding) -> float:
    """Tokens of a verify step, where the server answers every prompt freely."""
    tokens = verified = 0
    for start in range(0, len(traffic.samples), decoding.batch):
        some = [one.prompt for one in traffic.samples[start : start + decoding.batch]]
        for answer in server.generate(some, decoding.steps + 1):
            tokens += answer["meta_info"]["completion_tokens"] - 1  # the first is the prefill's
            verified += answer["meta_info"]["spec_verify_ct"]
    return tokens / verified
