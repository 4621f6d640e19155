"""Teacher forcing inside the server: a logit processor that decodes a given text, and notes how likely it was.

Kept apart and light, because the server's scheduler imports it by name.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import torch


class Force:
    """Every row's next token is the next of its `tokens`; its loss is appended to `file`.

    A row's parameters are {"row": any number, "tokens": token ids, "file": path}; a step appends one JSON line
    [[row, step, nats], ...], nats being -log P of the forced token under the model's own logits.
    """

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        """Replace logits [rows, vocabulary] by ones that allow each row its forced token only."""
        for row in params:
            row["step"] = row.get("step", -1) + 1
        targets = torch.tensor([row["tokens"][row["step"]] for row in params], device=logits.device).unsqueeze(1)
        nats = -logits.float().log_softmax(1).gather(1, targets).squeeze(1)
        notes = [(row["row"], row["step"], loss) for row, loss in zip(params, nats.tolist(), strict=True)]
        with Path(params[0]["file"]).open("a") as file:
            file.write(json.dumps(notes) + "\n")
        return torch.full_like(logits, -torch.inf).scatter_(1, targets, 0.0)


def serialize_force() -> str:
    """`Force` as the value of a request's `custom_logit_processor`; pickled by name."""
    return json.dumps({"callable": pickle.dumps(Force).hex()})
