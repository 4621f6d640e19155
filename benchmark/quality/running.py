"""Measurements of the quality of policies on a running server. The results have the format of `policy_quality`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmark.common.variant import BASELINE, Variant, parse_variant
from benchmark.quality.compare import compare_domains, report_figures
from benchmark.quality.decoding import Decoding
from benchmark.quality.instrument import Instrument
from benchmark.quality.measure import compare_loss
from benchmark.quality.traffic import Traffic, continue_prompts, read_texts, share_batch
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.tune.gauge import Gauge
from sglang_xshare.tune.measure import Measurement, agreement
from sglang_xshare.tune.texts import Sample

Run = dict[str, tuple[Measurement, dict[str, Any]]]
"""The results of one policy for each kind of batch: the measurement, and values that only a server provides."""


def measure_running(
    server: Instrument, prompts: Path | None, decoding: Decoding, policies: Sequence[str], top: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure the policies one after another, and yield (policy, results) for each one.

    The results are those of `policy_quality` without `layers`. `prompts` is a file of prompts. If it is None, the texts
    of `decoding` are used. The server answers the arithmetic problems freely. `accepted` is measured with the server's
    own draft tokens. At the end, also after an error, the server gets its previous policy back. Raises `PolicyError`
    or ValueError.
    """
    draft_tokens = server.get_draft_tokens()
    selecting = [parse_variant(text) for text in dict.fromkeys(policies) if text != BASELINE]
    for variant in selecting:  # checks all policies before the first switch
        if variant.policy in (None, "observe"):
            raise ValueError(f"policy must select (got {variant.name}, beside {BASELINE})")
        build_schedule(variant.policy, variant.keys, speculative=draft_tokens > 1)
    if not selecting:
        raise ValueError(
            f"policies must include one that selects: its steps count {BASELINE}'s experts (got {BASELINE})"
        )
    variants = [parse_variant(BASELINE), *selecting]
    samples: dict[str, Sequence[Sample]] = {}
    gauge = Gauge(server, samples)
    gauge.top, gauge.tokens_per_request = top, draft_tokens

    def go_on(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Return the server's answers under vanilla. An answer ends early at an end-of-text token."""
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
                    raise ValueError(f"--batch must be a size at which {first_name} selects (got {decoding.batch})")
                active = own - (measured.saved or 0.0) / layers
                domains, batch = batches[name].domains, decoding.batch
                figures[name] = _describe(measured, vanilla[name][0], active, domains, batch) | more
            report_figures(text, figures)
            yield text, figures
    finally:
        gauge.guard.restore()


def _run_all(
    server: Instrument, gauge: Gauge, variants: Sequence[Variant], batches: Mapping[str, Traffic], decoding: Decoding
) -> Iterator[tuple[str, Run]]:
    """Measure every policy on both kinds of batches, each time with an empty prefix cache.

    If there is only one domain, both kinds of batches are equal and are measured once.
    """
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


def _describe(
    found: Measurement, vanilla: Measurement, active: float, domains: Sequence[str], batch: int
) -> dict[str, Any]:
    nats, own, divergences = (torch.tensor(one)[:, None] for one in (found.nats, vanilla.nats, found.divergences))
    divergence = compare_loss(divergences, torch.zeros_like(divergences), batch=batch)
    return {
        "active_experts": active,
        "kept_mass": 1.0 if found.kept_mass is None else found.kept_mass,
        "agreement": agreement(found, vanilla),
        "divergence": {"nats": divergence.delta, "error": divergence.error, "batches": divergence.batches},
        "loss": compare_domains(nats, own, domains, batch),
    }


def _answer(server: Instrument, traffic: Traffic, batch: int, mixed: bool) -> list[bool]:
    """Return whether the server answers each problem right.

    If `mixed` is true, the batches also contain prompts of other domains.
    """
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
    """Return the mean number of tokens per verify step while the server answers every prompt freely."""
    tokens = verified = 0
    for start in range(0, len(traffic.samples), decoding.batch):
        some = [one.prompt for one in traffic.samples[start : start + decoding.batch]]
        for answer in server.generate(some, decoding.steps + 1):
            tokens += answer["meta_info"]["completion_tokens"] - 1  # the prefill returns the first token
            verified += answer["meta_info"]["spec_verify_ct"]
    return tokens / verified
