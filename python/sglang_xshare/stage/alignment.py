"""Slots sorted by the selection, handed to SGLang's Triton MoE runner in place of its own sorting."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ..types import Alignment, RunnerSlots

TAKEN = "The MoE runner takes its slots as the expert policy has sorted them"
logger = logging.getLogger(__name__)
Aligned = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Align = Callable[[torch.Tensor, int, int], Aligned]


class Aligner:
    """Hands the slots that a layer's selection has sorted to the MoE runner. One serves all layers, which run in turn.

    The runner's block size depends on the number of rows. Upstream answers its first request for such a batch; from
    then on the selection sorts for that block size. Before SGLang captures a graph, it runs the same shape eagerly.
    """

    def __init__(self) -> None:
        self.unasked = 0
        """Selections whose slots the runner has not asked for in this step; the stage resets it."""
        self.served = 0
        """How often the runner took what the selection had sorted; a graph's replays are not counted."""
        self._block_sizes: dict[int, int] = {}
        self._routed: tuple[torch.Tensor, int, Alignment | None] | None = None
        self._awaited = False
        self._warned = False

    def slots(self, rows: int) -> RunnerSlots:
        """What to ask of the selection for a batch of `rows` rows."""
        return RunnerSlots(self._block_sizes.get(rows))

    def offer(self, ids: torch.Tensor, num_experts: int, alignment: Alignment | None) -> None:
        """Take what a layer has routed: `ids` [n, k] int32 of `num_experts` experts, and their slots sorted or None."""
        self.unasked += 1
        self._awaited = True
        self._routed = ids, num_experts, alignment

    def align(self, upstream: Align, by_tma: bool, ids: torch.Tensor, block_size: int, num_experts: int) -> Aligned:
        """What `moe_align_block_size` (`upstream`) returns for these arguments, without a launch for ids that the
        selection has sorted.

        Upstream sorts all others (a draft's, a prefill's, remapped ones). It also sorts where the down projection loads
        its input `by_tma`: that input has as many rows as all experts' blocks could need, and from 0.5.22 on upstream
        refuses fewer sorted slots than that.
        """
        if self._routed is not None:
            routed, experts, alignment = self._routed
            # By address: upstream's compiled functions may wrap the same memory anew.
            same = ids.data_ptr() == routed.data_ptr() and ids.shape == routed.shape
            if same and num_experts == experts:
                self.unasked -= self._awaited
                self._awaited = False
                if not by_tma and alignment is not None and alignment.block_size == block_size:
                    if not self.served:
                        logger.info(TAKEN)
                    self.served += 1
                    return alignment.sorted_slots, alignment.block_experts, alignment.num_sorted
                if by_tma or self._block_sizes.get(len(ids)) == block_size:
                    self._warn(len(ids), by_tma)
                if not by_tma:
                    self._block_sizes[len(ids)] = block_size
        return upstream(ids, block_size, num_experts)

    def _warn(self, rows: int, by_tma: bool) -> None:
        """Log once that SGLang goes on sorting, and why."""
        if not self._warned:
            reason = "its down projection loads by TMA" if by_tma else "the kernel does not serve this plan or batch"
            logger.warning("--expert-policy-align: SGLang sorts the slots of %d rows itself: %s", rows, reason)
            self._warned = True
