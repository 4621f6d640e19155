"""Teacher forcing inside the server: a logit processor that decodes a given text, and tells how likely it was.

Upstream's API carries one number back for every token, its log-probability, and the same of the next most likely one.
Both are made to tell what the model itself thought.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

import torch

SCALE = 100.0
"""Nats by which one nat of log-probability stands for: float32 still tells 1e-5 nats apart."""
MOST = 34.0
"""Nats, as many as are told: the probability is less than 2e-15."""
OTHER = 0.345
"""Added to what is told where another token than the forced one is the most likely. All of it stays below ln 2, so that
the forced token is the one that is decoded.
"""


class Force:
    """Every row's next token is the next of its `tokens`. Its log-probability, negated, is `OTHER` if the model prefers
    another token, plus the nats of the forced one under the model's logits over `SCALE`. The token that the model likes
    best beside the forced one has all the rest of the probability.
    """

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        """Replace logits [rows, vocabulary]; a row's parameters are {"tokens": token ids}, to which it adds "step"."""
        for row in params:
            row["step"] = row.get("step", -1) + 1
        tokens = [row["tokens"][min(row["step"], len(row["tokens"]) - 1)] for row in params]
        forced = torch.tensor(tokens, device=logits.device).unsqueeze(1)
        scores = logits.float().log_softmax(1)
        nats = -scores.gather(1, forced)
        best = scores.argmax(1, keepdim=True)
        rival = scores.scatter(1, forced, -torch.inf).argmax(1, keepdim=True)
        told = nats.clamp(0, MOST) / SCALE + torch.where(best == forced, 0.0, OTHER)
        masked = torch.full_like(logits, -torch.inf).scatter_(1, rival, told.expm1().log().to(logits.dtype))
        return masked.scatter_(1, forced, 0.0)


def serialize_force() -> str:
    """`Force` as the value of a request's `custom_logit_processor`; pickled by name, so that the server needs this
    package, which one with an expert policy has.
    """
    return json.dumps({"callable": pickle.dumps(Force).hex()})


def read_step(log_probability: float, token: int, rival: int | None) -> tuple[float, int]:
    """(nats of the forced token, the most likely one) of the log-probability that came back, and of the token with the
    next best one.
    """
    told = -log_probability
    prefers_other = told >= OTHER - 1e-4
    nats = (told - OTHER if prefers_other else told) * SCALE
    return max(nats, 0.0), rival if prefers_other and rival is not None else token
