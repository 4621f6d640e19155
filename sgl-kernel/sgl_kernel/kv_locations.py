"""The KV slots of each request: functions that read and write SGLang's `req_to_token` table.

`req_to_token[r, p]` is the KV slot of position p of the request in pool row r. The functions write to their output
argument, like the kernels that they replace (SGLang's `kernels/ops/speculative`, `srt/mem_cache/allocation.py`).
Indices and lengths are int32 or int64. `pool_len`, the width of a row, is a part of the kernels' signature.
"""

import torch
from torch import Tensor


def _ragged_cells(rows: Tensor, start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows and the columns of the cells `[rows[i], start[i]:end[i]]`, both int64 [sum(end - start)].

    The cells of one request follow those of the previous request.
    """
    start = start.long()
    lengths = end.long() - start
    request_start = lengths.cumsum(0) - lengths
    columns = torch.arange(int(lengths.sum())) + torch.repeat_interleave(start - request_start, lengths)
    return torch.repeat_interleave(rows.long(), lengths), columns


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Write new slots to the table. The positions `start[i]:end[i]` of request i get the next slots of `out_cache_loc`.

    * `req_pool_indices`, `start` and `end` are [bs].
    * `req_to_token` [pool size, pool_len] is modified.
    * `out_cache_loc` has at least sum(end - start) elements.
    """
    rows, columns = _ragged_cells(req_pool_indices, start, end)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, out_cache_loc: Tensor, pool_len: int
) -> None:
    """Read the slots of some positions from the table, one request after the other.

    For request i these are the positions `start[i]:end[i]`.

    * `req_pool_indices`, `start` and `end` are [bs]. `req_to_token` is [pool size, pool_len].
    * `out_cache_loc` has at least sum(end - start) elements. Further elements are not modified.
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
    """Read the `topk * num_steps` slots after each request's sequence. The draft model stores its steps in these slots.

    * `req_pool_indices` and `seq_lens` are [bs]. `req_to_token` is [pool size, pool_len].
    * `out_cache_loc` [bs * topk * num_steps] is modified.
    """
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices.long()[:, None], columns]
    out_cache_loc[: slots.numel()] = slots.flatten().to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """Return one row for every draft branch: the slots of the request, then the `num_steps` slots of the branch.

    Branch t of a request owns `num_steps` positions, starting at `seq_lens[i] + t * num_steps` (page size 1).
    `req_to_token` is [pool size, pool_len]. `req_pool_indices` and `seq_lens` are [bs]. The result is [bs * topk,
    longest sequence + num_steps] in the dtype of the table. Attention reads no further columns.
    """
    length = seq_lens.long()[:, None, None]
    column = torch.arange((int(seq_lens.max()) if seq_lens.numel() else 0) + num_steps)
    branch_start = torch.arange(topk)[:, None] * num_steps
    position = column + branch_start * (column >= length)  # [bs, topk, columns]
    # Only the columns after the steps of a shorter request can be outside the table, and no code reads these columns.
    return req_to_token[req_pool_indices.long()[:, None, None], position.clamp(max=pool_len - 1)].flatten(0, 1)
