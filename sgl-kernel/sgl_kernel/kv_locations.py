"""The KV slots of each request: reads and writes of SGLang's `req_to_token` table.

`req_to_token[r, p]` is the KV slot of position p of the request in pool row r. The functions write into their output
argument, like the kernels that they replace (SGLang's `kernels/ops/speculative`, `srt/mem_cache/allocation.py`). Index
and length arguments are int32 or int64; `pool_len`, the width of a row, is part of the kernels' signature.
"""

import torch
from torch import Tensor


def _ragged_cells(rows: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and columns of the cells `[rows[i], start[i]:end[i]]`, by request: int64 [sum(end - start)]."""
    start = start.long()
    lengths = end.long() - start
    request_start = lengths.cumsum(0) - lengths
    columns = torch.arange(int(lengths.sum())) + torch.repeat_interleave(start - request_start, lengths)
    return torch.repeat_interleave(rows.long(), lengths), columns


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Write new slots into the table: positions `start[i]:end[i]` of request i take the next slots of `out_cache_loc`.

    req_pool_indices, start, end: [bs]; req_to_token: [pool size, pool_len], modified;
    out_cache_loc: [sum(end - start)] or longer.
    """
    rows, columns = _ragged_cells(req_pool_indices, start, end)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Read the slots of request i's positions `start[i]:end[i]` from the table, packed.

    req_pool_indices, start, end: [bs]; req_to_token: [pool size, pool_len];
    out_cache_loc: [sum(end - start)] or longer; its tail is not modified.
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
    """Read the `topk * num_steps` slots after each request's sequence, in which the draft model stores its steps.

    req_pool_indices, seq_lens: [bs]; req_to_token: [pool size, pool_len]; out_cache_loc: [bs * topk * num_steps],
    modified.
    """
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices.long()[:, None], columns]
    out_cache_loc[: slots.numel()] = slots.flatten().to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """Return a row for every draft branch: the request's slots, then the `num_steps` slots of the branch.

    Branch t of a request owns the positions from `seq_lens[i] + t * num_steps` on (page size 1).
    req_to_token: [pool size, pool_len]; req_pool_indices, seq_lens: [bs].
    Returns [bs * topk, longest sequence + num_steps] of the table's dtype, only as wide as attention reads.
    """
    length = seq_lens.long()[:, None, None]
    column = torch.arange((int(seq_lens.max()) if seq_lens.numel() else 0) + num_steps)
    branch_start = torch.arange(topk)[:, None] * num_steps
    position = column + branch_start * (column >= length)  # [bs, topk, columns]
    # Only columns behind the steps of a shorter request can lie outside the table, and no code reads these columns.
    return req_to_token[req_pool_indices.long()[:, None, None], position.clamp(max=pool_len - 1)].flatten(0, 1)
