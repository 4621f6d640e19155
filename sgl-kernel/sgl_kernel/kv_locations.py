"""Where each request's keys and values live: reads and writes of SGLang's `req_to_token` table.

`req_to_token[r, p]` is the KV slot of position p of the request in pool row r. All functions write into their output
argument, as the kernels they stand for do (SGLang's `kernels/ops/speculative` and `srt/mem_cache/allocation.py`).
Index and length arguments may be int32 or int64; `pool_len`, a row's width, is kept for the kernels' signature.
"""

import torch
from torch import Tensor


def _ragged_cells(rows: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every cell `[rows[i], start[i]:end[i]]`, request after request: two int64 tensors [sum of lengths]."""
    start = start.long()
    lengths = end.long() - start
    request_start = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    columns = torch.arange(total, device=rows.device) + torch.repeat_interleave(start - request_start, lengths)
    return torch.repeat_interleave(rows.long(), lengths), columns


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Write newly allocated slots: request i's positions `start[i]:end[i]` take the next slots of `out_cache_loc`.

    req_pool_indices, start, end: [bs]; req_to_token: [pool size, pool_len], modified; out_cache_loc: at least sum(end - start).
    """
    rows, columns = _ragged_cells(req_pool_indices, start, end)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Read the slots of request i's positions `start[i]:end[i]` into `out_cache_loc`, packed; its tail is left alone.

    req_pool_indices, start, end: [bs]; req_to_token: [pool size, pool_len]; out_cache_loc: at least sum(end - start), modified.
    """
    rows, columns = _ragged_cells(req_pool_indices, start, end)
    out_cache_loc[: rows.numel()] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the `topk * num_steps` slots behind each request's sequence: where the draft model writes its steps.

    req_pool_indices, seq_lens: [bs]; req_to_token: [pool size, pool_len]; out_cache_loc: [bs * topk * num_steps], modified.
    """
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_steps, device=seq_lens.device)
    slots = req_to_token[req_pool_indices.long()[:, None], columns]
    out_cache_loc[: slots.numel()] = slots.flatten().to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """Give every draft branch a table row of its own: its request's slots, then the branch's `num_steps` draft slots.

    Branch t of request i owns the slots at positions `seq_lens[i] + t * num_steps` and on (page size 1).
    req_to_token: [pool size, pool_len]; req_pool_indices, seq_lens: [bs].
    Returns [bs * topk, longest sequence + num_steps], the dtype of `req_to_token`: no wider than what attention reads.
    """
    lengths = seq_lens.long()
    columns = torch.arange(int(lengths.max()) + num_steps if lengths.numel() else 0, device=lengths.device)
    branch_offset = torch.arange(topk, device=lengths.device) * num_steps
    draft_shift = (columns >= lengths[:, None, None]) * branch_offset[:, None]  # [bs, topk, columns]
    source = (columns + draft_shift).clamp(max=pool_len - 1)  # only columns past a row's own end can need the clamp
    return req_to_token[req_pool_indices.long()[:, None, None], source].flatten(0, 1)
