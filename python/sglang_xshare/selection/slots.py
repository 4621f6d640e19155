"""Slots in the form that MoE runners need. Empty slots are filled, dropped or masked. Shared experts get columns."""

from typing import Any

import torch

from ..types import RunnerSlots, Selection
from .mask import mask_logits


def serve_runner(answer: Selection, logits: torch.Tensor, top_k: int, slots: RunnerSlots) -> dict[str, Any]:
    """Return the fields of a selection that must change for this MoE runner. The keys are the names of the fields."""
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

    The slot gets the first expert of its row. In a row without experts the slot gets `filler`, the result of
    `find_filler`. An MoE runner that does not filter experts would read weights out of bounds for id -1.
    """
    first = ids[:, :1]
    return torch.where(ids < 0, torch.where(first < 0, filler, first), ids)


def drop_slots(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return `ids` with -1 in each slot whose weight is 0, because such a slot adds nothing to the output.

    `ids` is a tensor [n, columns] int32, and `weights` has the same shape. A weight can also be 0 because the score of
    a chosen expert underflows. A slot with weight NaN is unchanged, because the model without a policy would return NaN
    too.
    """
    return ids.masked_fill(weights == 0, -1)


def refill_slots(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return `ids` [n, columns] int32. Every unused slot gets an id that is in use anyway.

    A slot is unused if its weight is 0 or its id is -1. It gets the first id of its row. In a row without ids it gets
    the largest id of all rows. If no row has an id, it gets 0.

    Use this function if ids were renumbered after they were filled. An expert may have several replicas. The filler of
    a row without experts may then be a replica that no row uses.
    """
    used = (weights != 0) & (ids >= 0)
    filler = torch.where(used, ids, 0).amax() if ids.numel() else 0
    first = torch.where(used[:, :1], ids[:, :1], filler)
    return torch.where(used, ids, first)


def find_filler(selected: torch.Tensor, vanilla_active: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """Return the id of an expert that some row uses, a 0-dim int32 tensor.

    The arguments are the tables [N] bool of a `Selection`. The result is the largest id of an active expert that is in
    the selected set and in some row's own top-k. The programs of the Triton kernel find such an expert without waiting
    for each other. If there is no such expert, the result is the largest id of an active expert. If no expert is
    active, the result is 0.
    """
    experts = torch.arange(len(active), dtype=torch.int32, device=active.device)
    keys = torch.where(selected & vanilla_active, experts + len(active), experts)
    return torch.where(active, keys, 0).amax() % len(active)
