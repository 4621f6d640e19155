"""The alignment that selection hands to upstream's fused MoE runner beside the ids.

The patch of `_prepare_fused_moe_run` calls `align` in place of `moe_align_block_size`. A forward of the model holds the
last offer, which is found by the ids' storage and shape, and is taken once. The offer holds the ids, so that no other
tensor can have their storage meanwhile.
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
    """The `alignment` of `ids` [n, columns], which are experts 0 to `num_experts` - 1.

    `untaken` are the numbers of rows at which the layer's runner has not taken the last offer. `is_used` is True after
    the runner's call with these ids.
    """

    ids: torch.Tensor
    num_experts: int
    alignment: Alignment
    untaken: set[int]
    is_used: bool = False


is_prebuilt = True
"""True if layers under a policy hand over alignments. A benchmark sets it to False, to measure both."""
taken: Counter[str] = Counter()
"""Calls of the runner that found an offer, by the host's count: eager steps and captures, no replays. Keys are
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

    The alignment of an offer that was `made` for exactly these ids takes the place of the call.
    """
    if made is None or made.is_used or not _is_of(made, ids, num_experts):
        return upstream(ids, block_size, num_experts)
    # Here, because a server without a policy loads this module and makes no offer.
    from ..selection.alignment import BLOCK, count_blocks

    made.is_used = True
    if block_size != BLOCK:
        taken["upstream"] += 1
        return upstream(ids, block_size, num_experts)
    made.untaken.discard(len(ids))
    taken["prebuilt"] += 1
    pairs, experts, total = made.alignment
    # The kernel leaves room for one block a pair, and the runner launches programs for the whole length.
    blocks = count_blocks(num_experts, ids.numel())
    return pairs[: blocks * BLOCK], experts[:blocks], total


def _is_of(made: Offer, ids: torch.Tensor, num_experts: int) -> bool:
    """Return whether the runner was called with the ids of an offer, for the experts that the offer is about."""
    return (
        ids.data_ptr() == made.ids.data_ptr()
        and ids.shape == made.ids.shape
        and ids.stride() == made.ids.stride()
        and ids.dtype == made.ids.dtype
        and num_experts == made.num_experts
    )
