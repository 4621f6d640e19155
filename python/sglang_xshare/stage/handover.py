"""The alignment that an MoE layer offers to SGLang's fused MoE runner.

An alignment lists (row, slot) pairs sorted by expert. The patch of `_prepare_fused_moe_run` calls `align` instead of
SGLang's `moe_align_block_size`. `ModelForward.offer` is the last offer. The runner may use this offer only once, and
only for the expert ids for which it was made. `align` recognizes these ids by their storage and their shape. An offer
keeps its ids alive, so no other tensor can get the same storage.
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
    """An offered alignment, and the expert ids for which it was made.

    `ids` [n, columns] contains expert ids from 0 to `num_experts` - 1. `untaken` is the set of the layer's `Offers`.
    `is_used` becomes True when the runner is called with these ids.
    """

    ids: torch.Tensor
    num_experts: int
    alignment: Alignment
    untaken: set[int]
    is_used: bool = False


class Offers:
    """The offers of one MoE layer. With `are_final` False, the runner gets other ids than the layer has selected."""

    def __init__(self, are_final: bool = True) -> None:
        self.are_final = are_final
        self.untaken: set[int] = set()
        """Each number of rows for which the runner has not used the last offer. `align` removes the others."""

    def are_wanted(self, rows: int) -> bool:
        """Return whether the layer selects with an alignment, because its runner may use the alignment."""
        return self.are_final and is_prebuilt and rows not in self.untaken

    def make(self, ids: torch.Tensor, num_experts: int, alignment: Alignment) -> Offer:
        """Return a new offer. It is untaken until `align` returns its alignment."""
        self.untaken.add(len(ids))
        return Offer(ids, num_experts, alignment, self.untaken)


is_prebuilt = True
"""True if layers offer alignments. A benchmark sets this flag to False to measure the difference."""
taken: Counter[str] = Counter()
"""The number of runner calls that found an offer. "prebuilt" counts the calls that used the offered alignment, and
"upstream" counts the calls that did not use it. Only eager steps and captures are counted, because a replay runs no
Python code.
"""


def align(
    made: Offer | None,
    upstream: Callable[..., tuple[torch.Tensor, ...]],
    ids: torch.Tensor,
    block_size: int,
    num_experts: int,
) -> tuple[torch.Tensor, ...]:
    """Return (sorted_token_ids, expert_ids, num_tokens_post_padded), as `upstream` does.

    `upstream` is SGLang's `moe_align_block_size`, and `ids` [n, columns] contains expert ids. `made` is the last offer.
    If it was made for these ids and this block size, return its alignment, and do not call `upstream`.
    """
    if made is None or made.is_used or not _is_of(made, ids, num_experts):
        return upstream(ids, block_size, num_experts)
    # Imported here, because a server without a policy also loads this module, but never uses an alignment.
    from ..selection.alignment import BLOCK, count_blocks

    made.is_used = True
    if block_size != BLOCK:
        taken["upstream"] += 1
        return upstream(ids, block_size, num_experts)
    made.untaken.discard(len(ids))
    taken["prebuilt"] += 1
    pairs, experts, total = made.alignment
    # The selection kernel allocates one block for each pair. The runner launches one program for each block of these
    # tensors. So the tensors are cut to the number of blocks that the ids can fill.
    blocks = count_blocks(num_experts, ids.numel())
    return pairs[: blocks * BLOCK], experts[:blocks], total


def _is_of(made: Offer, ids: torch.Tensor, num_experts: int) -> bool:
    """Return whether an offer was made for these ids and this number of experts."""
    return (
        ids.data_ptr() == made.ids.data_ptr()
        and ids.shape == made.ids.shape
        and ids.stride() == made.ids.stride()
        and ids.dtype == made.ids.dtype
        and num_experts == made.num_experts
    )
