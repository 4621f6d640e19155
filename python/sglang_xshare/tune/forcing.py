"""A logit processor for teacher forcing: the server decodes a given text and reports the model's predictions.

SGLang's API returns log-probabilities for each decoded token and for the most likely tokens at its position. These
log-probabilities encode the reports.
"""

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

SCALE = 100.0
"""The divisor of the model's nats in a report. At this scale, float32 still distinguishes nats that differ by 1e-5."""
MOST = 34.0
"""The most nats that are reported, which is a probability of less than 2e-15."""
OTHER = 0.345
"""The number added to a report if the model prefers another token. Reports stay below ln 2, so the forced token is
decoded.
"""


class Force:
    """The logit processor. It forces the tokens of each row, and the model decides after the last forced token.

    The report is the forced token's negative log-probability after this processor. It equals the token's nats under the
    model, divided by `SCALE`. `OTHER` is added if the model prefers another token. The other tokens share the remaining
    probability as they do under the model.
    """

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        """Return logits [rows, vocabulary] that force the next token of each row.

        `params` contains {"tokens": token ids} for each row. Each call updates the entry "step", the number of the next
        token.
        """
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
    """The model's prediction for a forced token.

    `nats` is the forced token's negative log-probability, and `greedy` is the most likely token. `likeliest` contains
    log-probabilities by token, including that of the forced token.
    """

    nats: float
    greedy: int
    likeliest: dict[int, float]


def serialize_force() -> str:
    """Return `Force` as a request's `custom_logit_processor`.

    It is pickled by name, so the server needs this package.
    """
    return json.dumps({"callable": pickle.dumps(Force).hex()})


def read_step(log_probability: float, token: int, others: Sequence[tuple[float | None, int]]) -> Prediction:
    """Return the prediction from the log-probabilities of a step.

    `log_probability` is that of the forced token. `others` contains (log-probability, token) pairs, the most likely
    first.
    """
    told = -log_probability
    prefers_other = told >= OTHER - 1e-4
    nats = max((told - OTHER if prefers_other else told) * SCALE, 0.0)
    likeliest = {token: -nats}
    rest = -math.expm1(-nats)  # the model's probability of all other tokens; the reported one is 1 - exp(-told)
    if rest > 0 and told > 0:
        scale = math.log(rest) - math.log(-math.expm1(-told))
        likeliest |= {other: score + scale for score, other in others if score is not None}
    return Prediction(nats, others[0][1] if prefers_other and others else token, likeliest)
