"""Masked logits, for runners that rank logits themselves; `sglang_xshare.selection.mask` says what they are.

The selection kernel writes them itself. `mask_kernel` does it in a launch of its own: where another backend selects, on
a GPU (plain torch takes some twenty launches), and where the selection's programs cannot wait for each other.
"""

import torch
import triton
import triton.language as tl

from ...types import Selection
from .recipe import OPTIONS


@triton.jit
def complete(used: tl.tensor, exists: tl.tensor, top_k: tl.constexpr) -> tl.tensor:
    """The experts used [E] bool, with the lowest-numbered others up to top-k. Idempotent, also halfway: programs may
    store what they complete while others still read. Nor does `find_spare` tell the difference: top-k experts in use
    are the spare ones, sure or not.
    """
    idle = (exists & ~used).to(tl.int32)
    return used | ((idle > 0) & (tl.cumsum(idle, 0) <= top_k - tl.sum(used.to(tl.int32), 0)))


@triton.jit
def find_spare(
    sure: tl.tensor, active: tl.tensor, experts: tl.tensor, exists: tl.tensor, top_k: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(where empty slots go, experts in use), [E] bool, once all rows are stored; `sure`: in S and in a row's top-k."""
    used = tl.load(active + experts, mask=exists, other=0) != 0
    in_use = complete(used, exists, top_k)
    sure &= used
    enough = tl.sum(sure.to(tl.int32), 0) >= top_k
    return (enough & sure) | (~enough & in_use), in_use


@triton.jit(do_not_specialize=["row_stride"])
def mask_kernel(
    logits: tl.tensor,  # [n, N]; the experts of a row are contiguous
    topk_ids: tl.tensor,  # [n, columns] int32, -1 in an empty slot
    selected: tl.tensor,  # [N] bool
    vanilla_active: tl.tensor,  # [N] bool
    active: tl.tensor,  # [N] bool
    masked: tl.tensor,  # [n, N], as the logits
    in_use_out: tl.tensor,  # [N] bool; may be `active`
    row_stride: tl.tensor,
    num_experts: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    slots: tl.constexpr,
    top_k: tl.constexpr,
    lowest: tl.constexpr,
) -> None:
    """One row a program; every one finds out for itself where empty slots go."""
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, width)
    exists = expert < num_experts
    sure = tl.load(selected + expert, mask=exists, other=0) != 0
    sure &= tl.load(vanilla_active + expert, mask=exists, other=0) != 0
    spare, in_use = find_spare(sure, active, expert, exists, top_k)
    slot = tl.arange(0, slots)
    ids = tl.load(topk_ids + row * columns + slot, mask=slot < columns, other=-1)
    chosen = tl.max((ids[:, None] == expert[None, :]).to(tl.int32), 0) > 0
    own = tl.load(logits + row * row_stride + expert, mask=exists & chosen, other=0)
    rest = tl.where(spare, lowest, float("-inf")).to(own.dtype)
    tl.store(masked + row * num_experts + expert, tl.where(chosen, own, rest), mask=exists)
    if row == 0:
        tl.store(in_use_out + expert, in_use, mask=exists)


def mask_logits(logits: torch.Tensor, selection: Selection, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(masked logits [n, N] in the logits' dtype, in_use [N] bool) of at least one row."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    masked, in_use = allocate_masked(logits), torch.empty_like(selection.active)
    launch_mask(logits, selection, top_k, masked, in_use)
    return masked, in_use


def allocate_masked(logits: torch.Tensor) -> torch.Tensor:
    """[n, N] contiguous, as the logits."""
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def launch_mask(
    logits: torch.Tensor, selection: Selection, top_k: int, masked: torch.Tensor, in_use: torch.Tensor
) -> None:
    """Write `masked` and `in_use`, which may be the selection's own active experts."""
    rows, num_experts = logits.shape
    columns = selection.topk_ids.shape[1]
    mask_kernel[(rows,)](
        logits,
        selection.topk_ids,
        selection.selected,
        selection.vanilla_active,
        selection.active,
        masked,
        in_use,
        logits.stride(0),
        num_experts=num_experts,
        width=triton.next_power_of_2(num_experts),
        columns=columns,
        slots=triton.next_power_of_2(columns),
        top_k=top_k,
        lowest=torch.finfo(logits.dtype).min,
        num_warps=1,
        **OPTIONS,
    )
