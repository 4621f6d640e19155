"""Teacher forcing inside the server: a logit processor that decodes a given text and reports the model's prediction.

The report is in the log-probabilities of each token and of the next likeliest ones, which upstream's API returns.
"""

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

SCALE = 100.0
"""The model's nats are divided by this number to be reported: float32 still distinguishes 1e-5 of the model's nats."""
MOST = 34.0
"""The most nats that are reported: the probability is less than 2e-15."""
OTHER = 0.345
"""Nats added to a report if the model prefers another token. Reports stay below ln 2, so forced tokens are decoded."""


class Force:
    """The logit processor: a row's next token is the next of its `tokens`; after the last one the model decides.

    The forced token's reported log-probability, negated, is its nats under the model's logits divided by `SCALE`, plus
    `OTHER` if the model prefers another token. Other tokens share the rest of the probability as they do in the model.
    """

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        """Replace logits [rows, vocabulary]. A row's parameters are {"tokens": token ids}; the call adds "step"."""
        for row in params:
            row["step"] = row.get("step", -1) + 1
        live = torch.tensor([row["step"] < len(row["tokens"]) for row in params], device=logits.device).unsqueeze(1)
        tokens = [row["tokens"][min(row["step"], len(row["tokens"]) - 1)] for row in params]
        forced = torch.tensor(tokens, device=logits.device).unsqueeze(1)
        scores = logits.float().log_softmax(1)
        nats = -scores.gather(1, forced)
        best = scores.argmax(1, keepdim=True)
        told = nats.clamp(0, MOST) / SCALE + torch.where(best == forced, 0.0, OTHER)
        others = scores.scatter(1, forced, -torch.inf)
        others += told.expm1().log() - others.logsumexp(1, keepdim=True)
        others = others.nan_to_num(-torch.inf, neginf=-torch.inf)  # NaN if the forced token is certain
        return torch.where(live, others.scatter(1, forced, 0.0).to(logits.dtype), logits)


@dataclass(frozen=True)
class Prediction:
    """The model's prediction for a forced token; `likeliest` has log-probabilities, also that of the forced token."""

    nats: float
    greedy: int
    likeliest: dict[int, float]


def serialize_force() -> str:
    """Return `Force` as a request's `custom_logit_processor`, pickled by name: the server needs this package."""
    return json.dumps({"callable": pickle.dumps(Force).hex()})


def read_step(log_probability: float, token: int, others: Sequence[tuple[float | None, int]]) -> Prediction:
    """Read a prediction from the forced token's log-probability and `others`, falling (log-probability, token)."""
    told = -log_probability
    prefers_other = told >= OTHER - 1e-4
    nats = max((told - OTHER if prefers_other else told) * SCALE, 0.0)
    likeliest = {token: -nats}
    rest = -math.expm1(-nats)  # the model's probability of all other tokens; the reported one is 1 - exp(-told)
    if rest > 0 and told > 0:
        scale = math.log(rest) - math.log(-math.expm1(-told))
        likeliest |= {other: score + scale for score, other in others if score is not None}
    return Prediction(nats, others[0][1] if prefers_other and others else token, likeliest)
