"""What MoE runners take: empty slots filled, dropped or masked away, and shared experts' columns."""

from typing import Any

import torch

from ..types import RunnerSlots, Selection
from .mask import mask_logits


def serve_runner(answer: Selection, logits: torch.Tensor, top_k: int, slots: RunnerSlots) -> dict[str, Any]:
    """Fields of an answer [n, k] as its runner takes them, in place of what they were."""
    if slots.masked:
        masked, in_use = mask_logits(logits, answer, top_k)
        return {"masked_logits": masked, "active": in_use}
    ids, weights = answer.topk_ids, answer.topk_weights
    if not slots.empty:
        ids = fill_slots(ids, find_filler(answer.selected, answer.vanilla_active, answer.active))
    if slots.shared:
        experts = logits.shape[1] + torch.arange(slots.shared, dtype=ids.dtype, device=ids.device)
        ids = torch.cat([ids, experts.expand(len(ids), -1)], 1)
        weights = torch.cat([weights, weights.new_full((len(ids), slots.shared), slots.shared_weight)], 1)
    return {"topk_ids": ids, "topk_weights": weights}


def fill_slots(ids: torch.Tensor, filler: torch.Tensor) -> torch.Tensor:
    """Give every empty slot of `ids` [n, k] int32 (-1) an expert that is active anyway: the row's own first, or for a
    row without any `filler` (`find_filler`). MoE runners read weights out of bounds at -1 unless they filter experts.
    """
    first = ids[:, :1]
    return torch.where(ids < 0, torch.where(first < 0, filler, first), ids)


def drop_slots(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`ids` [n, columns] int32 with -1 where `weights`, of the same shape, are 0, which adds nothing: also those of
    chosen experts whose score underflows. A weight that is NaN stays, as the model itself would show it.
    """
    return ids.masked_fill(weights == 0, -1)


def refill_slots(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return `ids` [n, columns] int32 in which every slot of weight 0, or of id -1, holds an id that is in use anyway:
    the row's own first, or for a row without any the largest of all rows; 0 where no row has one.

    For ids filled before something else renumbered them. A filler is its row's first expert, but where an expert has
    several replicas, that of a row without experts may have become one that no row uses.
    """
    used = (weights != 0) & (ids >= 0)
    filler = torch.where(used, ids, 0).amax() if ids.numel() else 0
    first = torch.where(used[:, :1], ids[:, :1], filler)
    return torch.where(used, ids, first)


def find_filler(selected: torch.Tensor, vanilla_active: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """An expert that some row uses, 0-dim int32, of the tables [N] bool of a `Selection`: the largest that is also in S
    and in some row's own top-k, which Triton's programs know early, else the largest; 0 where no row is live.
    """
    experts = torch.arange(len(active), dtype=torch.int32, device=active.device)
    keys = torch.where(selected & vanilla_active, experts + len(active), experts)
    return torch.where(active, keys, 0).amax() % len(active)
