"""Cross-entropy, greedy agreement, arithmetic answers and active experts of a policy on held-out text."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import inf
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel

from benchmark.common.interval import find_quantile
from benchmark.quality.model import Layout, Plans, Routing, Select, prefill
from benchmark.quality.text import Sequences

TOP = 64
"""Likeliest tokens that are kept of each prediction."""
MOST = 1024
"""The largest number of likeliest tokens of a request: a number beyond the vocabulary ends the server."""
LEAST = 1e-7
"""The least probability that counts: in float32, 1 less the other probabilities has an error of this size."""


@dataclass(frozen=True)
class Top:
    """The likeliest tokens, `ids` [sequences, tokens, N] int64, and their log-probabilities `logs`, float32."""

    ids: torch.Tensor
    logs: torch.Tensor

    @classmethod
    def of_logits(cls, logits: torch.Tensor, count: int) -> "Top":
        """Read [sequences, tokens, vocabulary], one sequence at a time: a large vocabulary would not fit twice."""
        found = [one.log_softmax(1).topk(min(count, one.shape[1])) for one in logits]
        return cls(torch.stack([one.indices for one in found]), torch.stack([one.values for one in found]))


def diverge(reference: Top, other: Top) -> torch.Tensor:
    """Return the Kullback-Leibler divergence of `other` from `reference`, [sequences, tokens] float64, in nats.

    The sum covers the tokens that both have and one bucket for all other tokens: a lower bound, because merging
    outcomes never raises the divergence, and exact if both have the whole vocabulary.
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
    """The results of one policy on some sequences, decoded with teacher forcing after the prompt.

    `nats`: [sequences, tokens] float32, -log P of every token after the prompt except the first. `greedy`: [sequences,
    tokens] int64, the most likely token in its place. `right`: [sequences, tokens] bool, whether both are the same.
    `answers`: [answers] bool, whether each token of an arithmetic answer was the most likely one. `top`: the likeliest
    tokens in place of each token, if requested.
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
        """Return the mean of active experts a layer and step."""
        return torch.cat(self.routing.active).mean().item()

    @cached_property
    def kept_mass(self) -> float:
        """Return the mean share of gating mass kept."""
        return torch.cat(self.routing.kept_mass).mean().item()

    @cached_property
    def accepted(self) -> float:
        """Return the mean tokens a verify step yields if the text is the draft: its leading hits, and one more."""
        drafts = self.right.unflatten(1, (-1, self.layout.tokens_per_request))
        return drafts[..., :-1].long().cumprod(2).sum(2).float().mean().item() + 1


class Bench:
    """A model whose sequences are prefilled once, `prompt` tokens of each, and decoded under many policies."""

    def __init__(self, model: PreTrainedModel, sequences: Sequences, prompt: int) -> None:
        self.sequences = sequences
        self.prompt = prompt
        self._prefilled = prefill(model, sequences.tokens[:, :prompt])

    @torch.inference_mode()
    def run(self, plan: Plans, layout: Layout, top: int = 0, selects: Sequence[Select] | None = None) -> Decoded:
        """Decode under `plan`, of all or each layer; keep `top` tokens. Raises ValueError for a wrong plan."""
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
    """A mean cross-entropy, and `delta` above another one on the same tokens, in nats a token.

    `error` is the standard error of `delta`: over `batches`, because selection couples the sequences of a batch; over
    single sequences if `batches` is None, as in records from before 2026-11-28.
    """

    cross_entropy: float
    delta: float
    error: float
    batches: int | None = None

    def __str__(self) -> str:
        """Return the difference in nats a token."""
        return self.format()

    def format(self, digits: int = 4) -> str:
        """Return the difference in nats a token, with this number of digits."""
        return format_loss(asdict(self), digits)


def find_margin(loss: Mapping[str, Any]) -> float:
    """Return the ± of a loss's fields: half its 95 % t-interval over batches, else the recorded standard error."""
    batches = loss.get("batches")
    if batches == 1:
        return inf
    return loss["error"] if batches is None else loss["error"] * find_quantile(batches - 1)


def find_bound(loss: Mapping[str, Any]) -> float:
    """Return the difference from which a loss is measurable: its margin, or two standard errors over sequences."""
    return find_margin(loss) * (2 if loss.get("batches") is None else 1)


def format_loss(loss: Mapping[str, Any], digits: int = 4) -> str:
    """Return the fields of a `Loss` as the difference ± what `explain_errors` describes."""
    margin = find_margin(loss)
    return f"{loss['delta']:+.{digits}f} " + ("(one batch)" if margin == inf else f"± {margin:.{digits}f}")


def explain_errors(losses: Iterable[Mapping[str, Any]]) -> str:
    """Return the sentence that explains the ± of these losses."""
    return BY_BATCH if all(loss.get("batches") is not None for loss in losses) else BY_SEQUENCE


BY_BATCH = "±: half the 95 % t-interval over batches, because selection couples the sequences of a batch."
BY_SEQUENCE = """\
±: the standard error over sequences, as recorded; it ignores that selection couples the sequences of a batch. A loss
within two errors of 0 proves nothing."""


def compare_loss(
    nats: torch.Tensor, reference: torch.Tensor, counted: torch.Tensor | None = None, batch: int | None = None
) -> Loss:
    """Return the loss of `nats` [sequences, tokens] above `reference`'s.

    Only tokens that are `counted` (bool, same shape) count, and only sequences that have one. `batch` consecutive
    sequences were decoded together; without it, the error is that of single sequences.
    """
    kept = torch.ones_like(nats, dtype=torch.bool) if counted is None else counted
    of_text, deltas = means_by_sequence(nats, kept), means_by_sequence(nats - reference, kept)
    groups = torch.arange(len(nats))[kept.any(1)] // (batch or 1)
    found, places = groups.unique(return_inverse=True)
    sums = torch.zeros(len(found), dtype=torch.float64).index_add(0, places, deltas - deltas.mean())
    scale = len(found) / max(len(found) - 1, 1)
    error = (scale * sums.square().sum()).sqrt().item() / len(deltas)  # cluster-robust standard error
    return Loss(of_text.mean().item(), deltas.mean().item(), error, len(found) if batch else None)


def means_by_sequence(values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return the means over counted tokens, float64, of the sequences that have one."""
    some = counted.any(1)
    return values.double().where(counted, 0.0).sum(1)[some] / counted.sum(1)[some]


def losses_by_batch(decoded: Decoded, vanilla: Decoded, counted: torch.Tensor | None = None) -> list[float]:
    """Return the loss above vanilla's of each batch, in nats a token."""
    kept = torch.ones_like(decoded.nats, dtype=torch.bool) if counted is None else counted
    batches = zip(
        (decoded.nats - vanilla.nats).split(decoded.layout.batch), kept.split(decoded.layout.batch), strict=True
    )
    return [means_by_sequence(*one).mean().item() for one in batches]


def compare_nats(point: Mapping[str, Any], reference: Mapping[str, Any], batch: int | None = None) -> Loss:
    """Return the loss of a record's point, whose `nats` are means of sequences, above that of another point."""
    nats, others = (torch.tensor(one["nats"])[:, None] for one in (point, reference))
    return compare_loss(nats, others, batch=batch)


def agreement(decoded: Decoded, vanilla: Decoded) -> float:
    """Return the share of tokens for which the most likely one is vanilla's."""
    return (decoded.greedy == vanilla.greedy).float().mean().item()


def compare_top(top: Top, vanilla: Top, batch: int | None = None) -> dict[str, Any]:
    """Return the mean divergence from vanilla on the same tokens, in `nats`; `error` and `batches` as of `Loss`."""
    means = diverge(vanilla, top).mean(1, keepdim=True)
    loss = compare_loss(means, torch.zeros_like(means), batch=batch)
    return {"nats": loss.delta, "error": loss.error, "batches": loss.batches}
