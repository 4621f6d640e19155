"""What a server's layers select, and from which logits, where values are computed: also in the replay of a graph.

With $FAKE_GPU_PROBE, every selection starts from logits drawn anew, since the hidden states of a model without weights
hardly differ, and is appended to that file, a JSON line each. With $FAKE_GPU_FORGET=1 selections do not know how many
slots there are, which makes what was promised of them a lie.
"""

import functools
import json
import os
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from fake_gpu import values

_drawn = count()


def install(layers: Any) -> None:
    """Follow module `sglang_xshare.stage.layer`."""
    if os.environ.get("FAKE_GPU_FORGET"):
        select = layers.select
        layers.select = lambda logits, plan, router, batch, *ranks, **keys: select(
            logits, plan, router, replace(batch, resident=None, slots=None), *ranks, **keys
        )
    if path := os.environ.get("FAKE_GPU_PROBE"):
        _follow(layers.Layer, Path(path))


def _follow(layer_type: Any, path: Path) -> None:
    import torch

    select = layer_type.select

    def draw(logits: Any) -> None:
        generator = torch.Generator().manual_seed(next(_drawn))
        logits.copy_(2 * torch.randn(logits.shape, generator=generator))

    def write(found: dict[str, Any]) -> None:
        if found["valid"] is None or found["valid"].any():  # a capture has no live row
            text = {key: one.tolist() if isinstance(one, torch.Tensor) else one for key, one in found.items()}
            with path.open("a") as file:
                file.write(json.dumps(text) + "\n")

    @functools.wraps(select)
    def select_and_tell(self: Any, logits: Any, plan: Any, *args: Any, **keys: Any) -> Any:
        given = values.alias(logits)
        values.do(lambda: draw(given))
        answer, batch = select(self, logits, plan, *args, **keys), self.step.batch
        tensors = {
            **{"valid": batch.valid, "exact": batch.exact, "depth": batch.depth},
            **{"logits": logits, "active": answer.active},
            **{"ids": answer.topk_ids, "weights": answer.topk_weights, "kept_mass": answer.kept_mass},
        }
        found = {key: None if one is None else values.alias(one) for key, one in tensors.items()}
        found |= {"layer": self.layer_id, "policy": plan.policy, "tokens_per_request": batch.tokens_per_request}
        values.do(lambda: write(found))
        return answer

    layer_type.select = select_and_tell
