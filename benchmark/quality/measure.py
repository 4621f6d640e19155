"""Measurements of a policy on held-out text: loss, agreement with vanilla, arithmetic answers and active experts."""

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
"""The number of likeliest tokens that are kept of each prediction."""
MOST = 1024
"""The maximum number of likeliest tokens in a request. A number above the vocabulary size would stop the server."""
LEAST = 1e-7
"""The lower bound of a probability. In float32, 1 minus the sum of other probabilities has an error of this size."""


@dataclass(frozen=True)
class Top:
    """The N likeliest tokens of each prediction.

    `ids` [sequences, tokens, N] int64 contains the tokens, and `logs` (float32) contains their log-probabilities.
    """

    ids: torch.Tensor
    logs: torch.Tensor

    @classmethod
    def of_logits(cls, logits: torch.Tensor, count: int) -> "Top":
        """Find the `count` likeliest tokens in logits [sequences, tokens, vocabulary].

        One sequence is processed at a time, because the log-probabilities of all sequences need too much memory.
        """
        found = [one.log_softmax(1).topk(min(count, one.shape[1])) for one in logits]
        return cls(torch.stack([one.indices for one in found]), torch.stack([one.values for one in found]))


def diverge(reference: Top, other: Top) -> torch.Tensor:
    """Return the Kullback-Leibler divergence of `other` from `reference` in nats, as [sequences, tokens] float64.

    The sum covers the tokens that both predictions contain. All other tokens are merged into one. The result is a lower
    bound, because merging tokens never increases the divergence. It is exact if both contain the whole vocabulary.
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
    """The results of one policy. The sequences were decoded with teacher forcing after the prompt.

    The first token after the prompt is not part of the results.

    - `nats` [sequences, tokens] float32: the loss of every token, -log P.
    - `greedy` [sequences, tokens] int64: the most likely token at each position.
    - `right` [sequences, tokens] bool: whether the most likely token is the token of the text.
    - `answers` [answers] bool: whether all tokens of an arithmetic answer are right.
    - `top`: the likeliest tokens at each position, if they were requested.
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
        """Return the mean number of active experts per layer and step."""
        return torch.cat(self.routing.active).mean().item()

    @cached_property
    def kept_mass(self) -> float:
        """Return the mean share of the gating mass that the policy keeps."""
        return torch.cat(self.routing.kept_mass).mean().item()

    @cached_property
    def accepted(self) -> float:
        """Return the mean number of tokens that a verify step would accept if the drafts were the text itself.

        A step accepts its drafts up to the first wrong prediction, and one more token.
        """
        drafts = self.right.unflatten(1, (-1, self.layout.tokens_per_request))
        return drafts[..., :-1].long().cumprod(2).sum(2).float().mean().item() + 1


class Bench:
    """A model that prefills the first `prompt` tokens of each sequence once, and then decodes under many policies."""

    def __init__(self, model: PreTrainedModel, sequences: Sequences, prompt: int) -> None:
        self.sequences = sequences
        self.prompt = prompt
        self._prefilled = prefill(model, sequences.tokens[:, :prompt])

    @torch.inference_mode()
    def run(self, plan: Plans, layout: Layout, top: int = 0, selects: Sequence[Select] | None = None) -> Decoded:
        """Decode the sequences under a policy and return the results.

        `plan` is one plan for all MoE layers, or one plan for each. `top` is the number of likeliest tokens to keep.
        Raises ValueError if a plan does not fit the model.
        """
        tokens = self.sequences.tokens[:, self.prompt :]
        logits, routing = self._prefilled.decode(tokens[:, :-1], plan, layout, selects)
        targets = tokens[:, 1:]
        nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        greedy = logits.argmax(2)
        right = greedy == targets
        likeliest = Top.of_logits(logits, top) if top else None
        return Decoded(layout, routing, nats, greedy, right, self._answers_right(right), likeliest)

    def _answers_right(self, right: torch.Tensor) -> torch.Tensor:
        first = self.prompt + 1  # the position of the token that right[:, 0] describes
        spans = [(one.row, one.start - first, one.stop - first) for one in self.sequences.answers if one.start >= first]
        return torch.tensor([right[row, start:stop].all().item() for row, start, stop in spans], dtype=torch.bool)


@dataclass(frozen=True)
class Loss:
    """A mean cross-entropy in nats per token, and its difference `delta` from another one on the same tokens.

    `error` is the standard error of `delta`. It is computed over `batches`, because the sequences of a batch share
    their experts and are not independent. If `batches` is None, as in records from before 2026-11-28, the error is
    computed over single sequences.
    """

    cross_entropy: float
    delta: float
    error: float
    batches: int | None = None

    def __str__(self) -> str:
        """Format the difference and its margin with 4 decimals."""
        return self.format()

    def format(self, digits: int = 4) -> str:
        """Format the difference and its margin with this number of decimals."""
        return format_loss(asdict(self), digits)


def find_margin(loss: Mapping[str, Any]) -> float:
    """Return the margin of a loss, which the tables show after ±.

    The margin is half the 95 % t-interval over batches. If `batches` is None, the margin is the standard error.
    """
    batches = loss.get("batches")
    if batches == 1:
        return inf
    return loss["error"] if batches is None else loss["error"] * find_quantile(batches - 1)


def find_bound(loss: Mapping[str, Any]) -> float:
    """Return the smallest measurable difference: the margin, or two standard errors if `batches` is None."""
    return find_margin(loss) * (2 if loss.get("batches") is None else 1)


def format_loss(loss: Mapping[str, Any], digits: int = 4) -> str:
    """Format the difference and its margin. `explain_errors` explains the margin to the reader of a table."""
    margin = find_margin(loss)
    return f"{loss['delta']:+.{digits}f} " + ("(one batch)" if margin == inf else f"± {margin:.{digits}f}")


def explain_errors(losses: Iterable[Mapping[str, Any]]) -> str:
    """Return a sentence that explains the ± after these losses."""
    return BY_BATCH if all(loss.get("batches") is not None for loss in losses) else BY_SEQUENCE


BY_BATCH = "±: half the 95 % t-interval over batches, because selection couples the sequences of a batch."
BY_SEQUENCE = """\
±: the standard error over sequences, as recorded; it ignores that selection couples the sequences of a batch. A loss
within two errors of 0 proves nothing."""


def compare_loss(
    nats: torch.Tensor, reference: torch.Tensor, counted: torch.Tensor | None = None, batch: int | None = None
) -> Loss:
    """Compare the losses of tokens with the losses of a reference. Both have the shape [sequences, tokens].

    `counted` is a bool tensor of the same shape that marks the tokens to compare. Sequences without such tokens are
    ignored. `batch` is the number of consecutive sequences that were decoded together. If `batch` is None, the error
    is computed over single sequences.
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
    """Return the mean over the counted tokens of each sequence, as float64. Sequences without them are omitted."""
    some = counted.any(1)
    return values.double().where(counted, 0.0).sum(1)[some] / counted.sum(1)[some]


def losses_by_batch(decoded: Decoded, vanilla: Decoded, counted: torch.Tensor | None = None) -> list[float]:
    """Return the difference between the policy's loss and vanilla's, for each batch, in nats per token."""
    kept = torch.ones_like(decoded.nats, dtype=torch.bool) if counted is None else counted
    batches = zip(
        (decoded.nats - vanilla.nats).split(decoded.layout.batch), kept.split(decoded.layout.batch), strict=True
    )
    return [means_by_sequence(*one).mean().item() for one in batches]


def compare_nats(point: Mapping[str, Any], reference: Mapping[str, Any], batch: int | None = None) -> Loss:
    """Compare the losses of two points of a record. The `nats` of a point are the mean losses of its sequences."""
    nats, others = (torch.tensor(one["nats"])[:, None] for one in (point, reference))
    return compare_loss(nats, others, batch=batch)


def agreement(decoded: Decoded, vanilla: Decoded) -> float:
    """Return the share of positions at which the most likely token is the same as vanilla's."""
    return (decoded.greedy == vanilla.greedy).float().mean().item()


def compare_top(top: Top, vanilla: Top, batch: int | None = None) -> dict[str, Any]:
    """Return the mean divergence from vanilla in `nats`. `error` and `batches` have the same meaning as in `Loss`."""
    means = diverge(vanilla, top).mean(1, keepdim=True)
    loss = compare_loss(means, torch.zeros_like(means), batch=batch)
    return {"nats": loss.delta, "error": loss.error, "batches": loss.batches}
