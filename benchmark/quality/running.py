"""What policies cost on a running server, one policy after another, in the figures of an offline decode."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmark.common.variant import BASELINE, parse_variant
from benchmark.quality.compare import summarize, tell_figures
from benchmark.quality.decoding import Decoding
from benchmark.quality.divergence import Top
from benchmark.quality.instrument import Counted, Instrument
from benchmark.quality.measure import Decoded
from benchmark.quality.model import Layout, Routing
from benchmark.quality.traffic import Problem, Traffic, continue_prompts, read_texts, share_batch
from sglang_xshare.live.client import PolicyError
from sglang_xshare.policies.schedule import build_schedule


def running_quality(
    server: Instrument, traffic: Traffic, decoding: Decoding, policies: Sequence[str], top: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(policy, figures) as `policy_quality` gives them, vanilla's first. Leaves the last policy in force. `answers` are
    the problems that the server answers freely, `accepted` is the accepted length of its own drafts.

    Raises `PolicyError` or ValueError in one line.
    """
    gauge = _Gauge(server, decoding, top)
    batches = {"one_domain": traffic, "mixed": traffic.mix()}
    vanilla: dict[str, Decoded] = {}
    for text in dict.fromkeys([BASELINE, *policies]):
        found: dict[str, tuple[Decoded, dict[str, float]]] = {}
        for name, chosen in batches.items():
            if chosen == traffic and found:
                found[name] = found["one_domain"]  # of a single domain: nothing to mix
            else:
                found[name] = gauge.run(text, chosen, vanilla.get(name), mixed=name == "mixed")
        vanilla = vanilla or {name: decoded for name, (decoded, _) in found.items()}
        figures = {
            name: summarize(decoded, vanilla[name], batches[name].domains) | more
            for name, (decoded, more) in found.items()
        }
        tell_figures(text, figures)
        yield text, figures


def measure_running(
    server: Instrument, prompts: Path | None, decoding: Decoding, policies: Sequence[str], top: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """`running_quality` on a file of prompts, or else the texts of `decoding`. In the end the server has the policy
    that it had before, whatever happens.
    """
    before = server.get_policy()
    if before["limits"]["captured_rows"] and before["policy"] in ("observe", BASELINE):
        reason = f"its CUDA graphs were captured under {before['policy']} and follow no switch"
        raise ValueError(f"{server.url}: {reason}; allowed is a server started with the tightest of the policies")
    if "by_layer" not in before["counters"]:
        raise ValueError(
            f"{server.url}: it counts no single layers; allowed is a server with this version of the package"
        )
    speculative = server.get_draft_tokens() > 1
    for variant in map(parse_variant, policies):  # all of them before anything is switched
        build_schedule(variant.policy or BASELINE, variant.keys, speculative)
    try:
        if prompts is None:
            traffic = read_texts(decoding, server.tokenize)
        else:
            traffic = continue_prompts(prompts, decoding, server.tokenize, partial(_continue, server))
        yield from running_quality(server, traffic, decoding, policies, top)
    finally:
        server.set_policy(before)


def _continue(server: Instrument, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """What the server's own routing answers, up to an end of text."""
    _switch(server, BASELINE)
    return [list(one["output_ids"]) for one in server.generate(prompts, tokens, ignore_eos=False)]


class _Gauge:
    """Runs policies on a server, each from an empty cache."""

    def __init__(self, server: Instrument, decoding: Decoding, top: int) -> None:
        self.server, self.decoding, self.top = server, decoding, top
        self.draft_tokens = server.get_draft_tokens()

    def run(
        self, text: str, traffic: Traffic, vanilla: Decoded | None, mixed: bool
    ) -> tuple[Decoded, dict[str, float]]:
        """One policy on one order of the samples, and figures that only a server has."""
        server, batch = self.server, self.decoding.batch
        _switch(server, text)
        server.flush()
        forced = []
        for start in range(0, len(traffic.samples), batch):
            some = traffic.samples[start : start + batch]
            if self.draft_tokens > 1:
                forced += server.verify(some, self.top)
            else:
                forced += server.force([one.prompt for one in some], [one.text for one in some], self.top)
        counted = server.count(batch * self.draft_tokens)
        greedy = torch.tensor([one.greedy for one in forced])
        decoded = Decoded(
            Layout(batch),
            _read_routing(counted, text, vanilla, batch),
            torch.tensor([one.nats for one in forced]),
            greedy,
            greedy == torch.tensor([one.text[1:] for one in traffic.samples]),
            torch.tensor(self._answer(traffic, mixed), dtype=torch.bool),
            Top.of_steps([one.likeliest for one in forced]),
        )
        return decoded, self._accept(traffic) if self.draft_tokens > 1 else {}

    def _answer(self, traffic: Traffic, mixed: bool) -> list[bool]:
        """Of each problem, whether it is answered right: in batches of problems alone, or among the other domains."""
        self.server.flush()
        if not traffic.problems:
            return []
        longest = max(len(self.server.tokenize(one.answer)) for one in traffic.problems) + 1
        kinds, batch = len(set(traffic.domains)), self.decoding.batch
        own = max(batch // kinds, 1) if mixed else batch
        company = [one.prompt for one in (traffic.samples if mixed else traffic.problems)]
        right = []
        for some, prompts in share_batch(traffic.problems, company, own, batch):
            answers = self.server.generate(prompts, longest)
            right += [_is_right(one, answer["text"]) for one, answer in zip(some, answers, strict=False)]
        return right

    def _accept(self, traffic: Traffic) -> dict[str, float]:
        """Tokens of a verify step, where the server answers every prompt freely."""
        tokens = verified = 0
        for start in range(0, len(traffic.samples), self.decoding.batch):
            some = [one.prompt for one in traffic.samples[start : start + self.decoding.batch]]
            for answer in self.server.generate(some, self.decoding.steps + 1):
                tokens += answer["meta_info"]["completion_tokens"] - 1  # the first is the prefill's
                verified += answer["meta_info"]["spec_verify_ct"]
        return {"accepted": tokens / verified}


def _switch(server: Instrument, text: str) -> None:
    """To a policy. Vanilla is observed, so that its experts are counted, or else what captured graphs make of it."""
    body = parse_variant(text).body()
    if body["policy"] != BASELINE:
        server.switch(body)
        return
    try:
        server.switch({"policy": "observe"})
    except PolicyError:
        server.switch(body)


def _read_routing(counted: Counted, text: str, vanilla: Decoded | None, batch: int) -> Routing:
    """The means of each layer as a single step. Where nothing selected, a layer does as vanilla."""
    if vanilla is None:
        if not counted.anything:
            raise ValueError(
                f"--batch {batch}: the server counts no experts of vanilla there; allowed is a captured size"
            )
        before = [one[0] if one else 0.0 for one in counted.layers]
        active, kept = before, [1.0] * len(before)
    else:
        own = vanilla.routing.active
        active = [one[1] if one else float(mean) for one, mean in zip(counted.layers, own, strict=True)]
        kept = [one[2] if one else 1.0 for one in counted.layers]
    columns = [[torch.tensor([value]) for value in values] for values in (active, active, kept)]
    return Routing(*columns)


def _is_right(problem: Problem, text: str) -> bool:
    return text.lstrip().startswith(problem.answer.lstrip())
