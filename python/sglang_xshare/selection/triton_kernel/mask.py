"""Masked logits in one launch, for runners that rank logits themselves; `sglang_xshare.stage.mask` says what they are.

In plain torch they take some twenty small launches a layer, beside a selection of one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...types import Selection


@triton.jit(do_not_specialize=["row_stride"])
def mask_kernel(
    logits: tl.tensor,  # [n, N]; the experts of a row are contiguous
    topk_ids: tl.tensor,  # [n, columns] int32, -1 in an empty slot
    active: tl.tensor,  # [N] bool
    masked: tl.tensor,  # [n, N], as the logits
    awake: tl.tensor,  # [N] bool
    row_stride: tl.tensor,
    num_experts: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    slots: tl.constexpr,
    top_k: tl.constexpr,
    lowest: tl.constexpr,
) -> None:
    """One row a program; every one finds out for itself which experts are awake."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, width)
    exists = expert < num_experts
    used = tl.load(active + expert, mask=exists, other=0).to(tl.int32)
    asleep = exists.to(tl.int32) - used
    up = (used > 0) | ((asleep > 0) & (tl.cumsum(asleep, 0) <= top_k - tl.sum(used, 0)))
    slot = tl.arange(0, slots)
    ids = tl.load(topk_ids + row * columns + slot, mask=slot < columns, other=-1)
    chosen = tl.max((ids[:, None] == expert[None, :]).to(tl.int32), 0) > 0
    own = tl.load(logits + row * row_stride + expert, mask=exists & chosen, other=0)
    rest = tl.where(up, lowest, float("-inf")).to(own.dtype)
    tl.store(masked + row * num_experts + expert, tl.where(chosen, own, rest), mask=exists)
    if row == 0:
        tl.store(awake + expert, up, mask=exists)


def mask_logits(logits: torch.Tensor, selection: Selection, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(masked logits [n, N] in the logits' dtype, awake [N] bool) of at least one row."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, num_experts = logits.shape
    columns = selection.topk_ids.shape[1]
    masked, awake = torch.empty_like(logits, memory_format=torch.contiguous_format), torch.empty_like(selection.active)
    mask_kernel[(rows,)](
        logits,
        selection.topk_ids,
        selection.active,
        masked,
        awake,
        logits.stride(0),
        num_experts=num_experts,
        width=triton.next_power_of_2(num_experts),
        columns=columns,
        slots=triton.next_power_of_2(columns),
        top_k=top_k,
        lowest=torch.finfo(logits.dtype).min,
        num_warps=1,
    )
    return masked, awake
