"""Slots for MoE runners: empty slots are filled, dropped or masked, and shared experts get columns."""

from typing import Any

import torch

from ..types import RunnerSlots, Selection
from .mask import mask_logits


def serve_runner(answer: Selection, logits: torch.Tensor, top_k: int, slots: RunnerSlots) -> dict[str, Any]:
    """Return the fields of an answer [n, k] that change for a runner, by name."""
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
    """Fill every empty slot (-1) of `ids` [n, k] int32 with an expert that is active anyway.

    The expert is the row's own first, or `filler` (`find_filler`) for a row without experts. With id -1 MoE runners
    read weights out of bounds unless they filter experts.
    """
    first = ids[:, :1]
    return torch.where(ids < 0, torch.where(first < 0, filler, first), ids)


def drop_slots(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return `ids` [n, columns] int32 with -1 in each slot whose weight is 0, because such a slot adds nothing.

    Such a slot may contain a chosen expert whose score underflows. A slot with weight NaN stays, because the model
    itself would show the NaN. `weights` have the shape of `ids`.
    """
    return ids.masked_fill(weights == 0, -1)


def refill_slots(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return `ids` [n, columns] int32 in which every slot with weight 0 or id -1 has an id that is in use anyway.

    This id is the row's own first, or, for a row without any, the largest id of all rows; 0 if no row has an id. Use
    this function for filled ids that were renumbered afterwards: if an expert has several replicas, the filler of a row
    without experts may have become a replica that no row uses.
    """
    used = (weights != 0) & (ids >= 0)
    filler = torch.where(used, ids, 0).amax() if ids.numel() else 0
    first = torch.where(used[:, :1], ids[:, :1], filler)
    return torch.where(used, ids, first)


def find_filler(selected: torch.Tensor, vanilla_active: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """Return an expert that some row uses, 0-dim int32, from the tables [N] bool of a `Selection`.

    The result is the largest active expert that is in S and in some row's own top-k, because the Triton kernel's
    programs find such experts without waiting; else the largest active expert; 0 if no row is live.
    """
    experts = torch.arange(len(active), dtype=torch.int32, device=active.device)
    keys = torch.where(selected & vanilla_active, experts + len(active), experts)
    return torch.where(active, keys, 0).amax() % len(active)
