"""The alignment, (row, slot) pairs sorted by expert, that a layer offers to upstream's fused MoE runner.

The patch of `_prepare_fused_moe_run` calls `align` in place of `moe_align_block_size`. The model's forward holds the
last offer. `align` finds the offer by the ids' storage and shape, and uses the offer once. The offer holds the ids, so
no other tensor can have their storage meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..types import Alignment


@dataclass(eq=False)
class Offer:
    """The `alignment` of `ids` [n, columns], which name experts 0 to `num_experts` - 1.

    `untaken` are the numbers of rows at which the layer's runner has not taken the last offer. `is_used` is True after
    the runner's call with these ids.
    """

    ids: torch.Tensor
    num_experts: int
    alignment: Alignment
    untaken: set[int]
    is_used: bool = False


is_prebuilt = True
"""True if layers offer alignments. A benchmark sets the flag to False, to measure both cases."""
taken: Counter[str] = Counter()
"""Calls of the runner that found an offer, in eager steps and captures: the host counts no replays. Keys are
"prebuilt", and "upstream" for an offer that was not used.
"""


def align(
    made: Offer | None,
    upstream: Callable[..., tuple[torch.Tensor, ...]],
    ids: torch.Tensor,
    block_size: int,
    num_experts: int,
) -> tuple[torch.Tensor, ...]:
    """Return (sorted_token_ids, expert_ids, num_tokens_post_padded) of `ids` [n, columns], as `upstream` does.

    If the offer `made` is for exactly these ids, return its alignment, and do not call `upstream`.
    """
    if made is None or made.is_used or not _is_of(made, ids, num_experts):
        return upstream(ids, block_size, num_experts)
    # Imported here, because a server without a policy loads this module too, but makes no offer.
    from ..selection.alignment import BLOCK, count_blocks

    made.is_used = True
    if block_size != BLOCK:
        taken["upstream"] += 1
        return upstream(ids, block_size, num_experts)
    made.untaken.discard(len(ids))
    taken["prebuilt"] += 1
    pairs, experts, total = made.alignment
    # The selection kernel leaves room for one block a pair. The runner launches a program for each block of the
    # length, so the length is cut to the blocks that the ids can fill.
    blocks = count_blocks(num_experts, ids.numel())
    return pairs[: blocks * BLOCK], experts[:blocks], total


def _is_of(made: Offer, ids: torch.Tensor, num_experts: int) -> bool:
    """Return whether the runner was called with the ids and the number of experts of an offer."""
    return (
        ids.data_ptr() == made.ids.data_ptr()
        and ids.shape == made.ids.shape
        and ids.stride() == made.ids.stride()
        and ids.dtype == made.ids.dtype
        and num_experts == made.num_experts
    )
