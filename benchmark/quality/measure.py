"""Cross-entropy, greedy agreement, arithmetic answers and active experts of a policy on held-out text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from benchmark.quality.model import Layout, Plans, Routing, Select, prefill
from benchmark.quality.text import Sequences

TOP = 64
"""Tokens that are told of each prediction."""
MOST = 1024
"""As many as a server is asked for: more than its vocabulary would end it."""
LEAST = 1e-7
"""A probability below it counts as this one: it is what float32 leaves of 1 less the others."""


@dataclass(frozen=True)
class Top:
    """The likeliest tokens, `ids` [sequences, tokens, N] int64, and their log-probabilities `logs`, float32."""

    ids: torch.Tensor
    logs: torch.Tensor

    @classmethod
    def of_logits(cls, logits: torch.Tensor, count: int) -> "Top":
        """Of [sequences, tokens, vocabulary], one sequence at a time: a large vocabulary would not fit twice."""
        found = [one.log_softmax(1).topk(min(count, one.shape[1])) for one in logits]
        return cls(torch.stack([one.indices for one in found]), torch.stack([one.values for one in found]))


def diverge(reference: Top, other: Top) -> torch.Tensor:
    """The Kullback-Leibler divergence of `other` from `reference`, [sequences, tokens] float64 in nats, over the tokens
    that both tell and one bucket for all the rest: a lower bound, as merged outcomes always give, and the divergence
    itself where both tell the whole vocabulary.
    """
    return torch.stack(
        [_diverge(*one) for one in zip(reference.ids, reference.logs, other.ids, other.logs, strict=True)]
    )


def _diverge(ids: torch.Tensor, logs: torch.Tensor, other_ids: torch.Tensor, other_logs: torch.Tensor) -> torch.Tensor:
    known = torch.full((len(ids), int(max(ids.max(), other_ids.max())) + 1), torch.nan, dtype=torch.float64)
    rows = torch.arange(len(ids)).unsqueeze(1).expand_as(other_ids)
    known[rows, other_ids] = other_logs.double()
    logs, others = logs.double(), known.gather(1, ids)
    both = ~others.isnan()
    mass, other_mass = (one.exp().where(both, 0.0) for one in (logs, others))
    terms = mass * (_floor(mass).log() - _floor(other_mass).log())
    rest, other_rest = (_floor(1 - one.sum(1)) for one in (mass, other_mass))
    return terms.sum(1) + rest * (rest.log() - other_rest.log())


def _floor(probability: torch.Tensor) -> torch.Tensor:
    return probability.clamp(min=LEAST)


@dataclass(frozen=True)
class Decoded:
    """One policy on some sequences, decoded with teacher forcing after the prompt.

    `nats`: [sequences, tokens] float32, -log P of every token after the prompt but the first. `greedy`: [sequences,
    tokens] int64, the most likely token in its place. `right`: [sequences, tokens] bool, where they are the same.
    `answers`: [answers] bool, arithmetic answers whose every token was the most likely one. `top`: the likeliest tokens
    in place of each token, where they were asked for.
    """

    layout: Layout
    routing: Routing
    nats: torch.Tensor
    greedy: torch.Tensor
    right: torch.Tensor
    answers: torch.Tensor
    top: Top | None = None

    @cached_property
    def active(self) -> float:
        """Mean active experts a layer and step."""
        return torch.cat(self.routing.active).mean().item()

    @cached_property
    def kept_mass(self) -> float:
        """Mean share of gating mass kept."""
        return torch.cat(self.routing.kept_mass).mean().item()

    @cached_property
    def accepted(self) -> float:
        """Mean tokens a verification yields when the draft is the text itself: its leading hits, and one on top."""
        drafts = self.right.unflatten(1, (-1, self.layout.tokens_per_request))
        return drafts[..., :-1].long().cumprod(2).sum(2).float().mean().item() + 1


class Bench:
    """A model on sequences, prefilled once, decoded under many policies: `prompt` tokens, the last only predicted."""

    def __init__(self, model: PreTrainedModel, sequences: Sequences, prompt: int) -> None:
        self.sequences = sequences
        self.prompt = prompt
        self._prefilled = prefill(model, sequences.tokens[:, :prompt])

    @torch.inference_mode()
    def run(self, plan: Plans, layout: Layout, top: int = 0, selects: Sequence[Select] | None = None) -> Decoded:
        """Decode under `plan`, of all or each layer; keep the likeliest. Raises ValueError where something misfits."""
        tokens = self.sequences.tokens[:, self.prompt :]
        logits, routing = self._prefilled.decode(tokens[:, :-1], plan, layout, selects)
        targets = tokens[:, 1:]
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        greedy = logits.argmax(2)
        right = greedy == targets
        likeliest = Top.of_logits(logits, top) if top else None
        return Decoded(layout, routing, nats, greedy, right, self._answers_right(right), likeliest)

    def _answers_right(self, right: torch.Tensor) -> torch.Tensor:
        first = self.prompt + 1  # the token that right[:, 0] judges
        spans = [(one.row, one.start - first, one.stop - first) for one in self.sequences.answers if one.start >= first]
        return torch.tensor([right[row, start:stop].all().item() for row, start, stop in spans], dtype=torch.bool)


@dataclass(frozen=True)
class Loss:
    """A mean cross-entropy, and `delta` above another on the same tokens, nats a token, with standard `error`."""

    cross_entropy: float
    delta: float
    error: float

    def __str__(self) -> str:
        """The difference in nats a token."""
        return f"{self.delta:+.4f} ± {self.error:.4f}"


def compare_loss(nats: torch.Tensor, reference: torch.Tensor, counted: torch.Tensor | None = None) -> Loss:
    """The loss of `nats` [sequences, tokens] above `reference`'s, where `counted` (bool); two sequences at least."""
    counted = torch.ones_like(nats, dtype=torch.bool) if counted is None else counted
    of_text, deltas = (one.double().where(counted, 0.0).sum(1) / counted.sum(1) for one in (nats, nats - reference))
    return Loss(of_text.mean().item(), deltas.mean().item(), deltas.std().item() / len(deltas) ** 0.5)


def compare_nats(point: Mapping[str, Any], reference: Mapping[str, Any]) -> Loss:
    """The same of points of a record, whose `nats` are those of each sequence."""
    return compare_loss(*(torch.tensor(one["nats"])[:, None] for one in (point, reference)))


def agreement(decoded: Decoded, vanilla: Decoded) -> float:
    """Share of tokens for which the most likely one is vanilla's."""
    return (decoded.greedy == vanilla.greedy).float().mean().item()


@dataclass(frozen=True)
class Divergence:
    """Mean divergence of a policy's predictions from vanilla's, nats a token (`diverge`), with its standard error."""

    nats: float
    error: float


def compare_top(top: Top, vanilla: Top) -> Divergence:
    """The divergence from vanilla's on the same tokens; two sequences at least."""
    means = diverge(vanilla, top).mean(1)
    return Divergence(means.mean().item(), means.std().item() / len(means) ** 0.5)
