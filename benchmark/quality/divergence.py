"""How far one model's predictions lie from another's, told by the likeliest tokens of each alone."""

from dataclasses import dataclass

import torch

TOP = 64
"""Tokens that are told of each prediction."""
MOST = 1024
"""As many as a server is asked for: more than its vocabulary would end it."""
LEAST = 1e-7
"""A probability below it counts as this one: it is what float32 leaves of 1 less the others."""


@dataclass(frozen=True)
class Top:
    """The likeliest tokens of predictions: `ids` [sequences, tokens, N] int64, different in each prediction, and their
    log-probabilities `logs` [sequences, tokens, N] float32.
    """

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
