"""SGLang's process groups: this process's rank, and the collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def find_rank() -> tuple[int, int, int]:
    """Return this process's tensor-parallel rank and the sizes of two groups of ranks.

    The first group is the tensor-parallel group. The second contains the ranks that share this process's requests.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.tp_rank, parallel.tp_size, parallel.attn_tp_size


def is_first_rank() -> bool:
    """Return whether this process is the first rank of its tensor-parallel group."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank == 0


def all_gather(own: torch.Tensor, ranks: int) -> torch.Tensor:
    """Gather a tensor [n, ...] from each tensor-parallel rank. Return [ranks * n, ...] in the ranks' order.

    This is a collective.
    """
    from sglang.srt.runtime_context import get_parallel

    gathered = own.new_empty(ranks * len(own), *own.shape[1:])
    get_parallel().tp_group.all_gather_into_tensor(gathered, own)
    return gathered


def share_first(own: list[float]) -> list[float]:
    """Return the numbers of the first tensor-parallel rank.

    This is a collective, which is skipped with one rank. All ranks must pass equally many numbers.
    """
    import torch
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group
    if group.world_size == 1 or not own:
        return own
    shared = torch.tensor(own, dtype=torch.float64)
    torch.distributed.broadcast(shared, src=group.ranks[0], group=group.cpu_group)
    numbers: list[float] = shared.tolist()
    return numbers


def gather_rows(flags: torch.Tensor, rows: int, forward_batch: Any) -> torch.Tensor:
    """Gather one number for each row from all data-parallel attention ranks. Return them as [rows].

    `flags` contains this rank's numbers or bools. The rows are in the order in which SGLang gathers hidden states. This
    is a collective. Every rank must call it, in the same order as the model's own collectives.
    """
    import torch
    from sglang.srt.layers.dp_attention import dp_gather_replicate

    # Copy the flags as numbers, because SGLang's collectives take no booleans and may zero their input. On a GPU,
    # integers avoid the kernels for hidden states, as token ids do. On a CPU, the collectives add up only floats.
    own = flags.to(torch.float32 if flags.is_cpu else torch.int64)[:, None]
    gathered = own.new_empty(rows, 1)
    dp_gather_replicate(gathered, own, forward_batch)
    return gathered[:, 0]
