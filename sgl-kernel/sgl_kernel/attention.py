"""Attention over the paged KV cache. A request has one query (decode) or several queries (prefill, draft and verify).

Requests run as one batch if they have the same number of queries and similar numbers of tokens, within a factor of two.
Masked columns pad the batch. All computations use float32. In bfloat16 the rounding would depend on the padding, so
speculative decoding would change the output.
"""

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH_CELLS = 1 << 18  # at most 1 MiB of float32 keys, which fits a core's cache; larger batches were slower


def paged_attention(
    query: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    output: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    query_lens: Tensor,
    query_start: Tensor,
    scale: float,
    causal: bool = True,
    tree_mask: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Compute attention for the queries of each request. They attend to the tokens of the request in the KV cache.

    * `query` is [tokens, heads, head size]. `k_buffer` and `v_buffer` are [slots, KV heads, size] in any float dtype.
      The number of heads is a multiple of the number of KV heads.
    * `output` [tokens, heads, value size] receives the result. Rows of a request without tokens become zero.
    * `req_to_token` [pool size, positions] contains the slot of each position. `req_pool_indices` [bs] is the row of
      each request in this table.
    * `seq_lens` [bs] is the number of tokens of each request. The last `query_lens` [bs] of them are the queries.
      `query_start` [bs] is the first row of a request's queries.
    * `scale` multiplies the scores. `k_scale` and `v_scale` are the factors of quantized keys and values.

    Each query attends to the whole prefix. With `causal` a query also attends to the earlier queries of its request and
    to itself. Without `causal` it attends to all queries of the request. `tree_mask` is a flat bool tensor that
    replaces `causal`. It contains a mask [queries, queries] or [queries, sequence] for each request, one after the
    other. Only the columns of the queries are read.

    Raises ValueError if a request has more queries than tokens, or if the tree mask has neither of these sizes.
    """
    lengths, counts, starts = seq_lens.tolist(), query_lens.tolist(), query_start.tolist()
    trees = None if tree_mask is None else _split_tree_mask(tree_mask, lengths, counts)
    for count, requests in _batches(lengths, counts, k_buffer[0].numel()):
        rows = torch.tensor([starts[request] for request in requests])[:, None] + torch.arange(count)
        length = torch.tensor([lengths[request] for request in requests])[:, None]
        column = torch.arange(int(length.max()))
        if count == 0 or column.numel() == 0:
            output[rows] = 0
            continue
        if trees is not None:
            among_queries = torch.stack([trees[request] for request in requests])
        else:
            among_queries = torch.ones(len(requests), count, count, dtype=torch.bool)
            among_queries = among_queries.tril_() if causal else among_queries
        prefix = length - count
        visible = (column < prefix)[:, None].repeat(1, count, 1)
        visible.scatter_(2, (prefix + torch.arange(count))[:, None].expand(-1, count, -1), among_queries)
        # Padding repeats the last token of the request. Stale slots and slots of other requests, which may contain NaN,
        # are never read.
        slots = req_to_token[req_pool_indices[requests].long()[:, None], column.minimum(length - 1)]
        keys, values = _gather(k_buffer, slots), _gather(v_buffer, slots)
        attended = F.scaled_dot_product_attention(
            query[rows].float().transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=visible[:, None],
            scale=scale * k_scale,
            enable_gqa=True,
        )
        output[rows] = (attended.transpose(1, 2) * v_scale).to(output.dtype)


def _batches(lengths: list[int], counts: list[int], cells_a_token: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the batches of requests that run together. A batch is the number of queries, then a list of requests."""
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if count > length > 0:
            raise ValueError(
                f"sgl_kernel on CPU: request {request} has {count} queries; must be at most its {length} tokens"
            )
        alike[count, length.bit_length()].append(request)
    for (count, bits), requests in alike.items():
        size = max(1, BATCH_CELLS // (cells_a_token << bits))
        for first in range(0, len(requests), size):
            yield count, requests[first : first + size]


def _gather(buffer: Tensor, slots: Tensor) -> Tensor:
    """Return the keys or values at `slots` [requests, columns], in float32: [requests, columns, heads, size]."""
    return buffer.index_select(0, slots.flatten()).float().view(*slots.shape, *buffer.shape[1:])


def _split_tree_mask(tree_mask: Tensor, lengths: list[int], counts: list[int]) -> list[Tensor]:
    """Return the parts of a flat mask: one mask [queries, queries] for each request."""
    sizes = {}
    for name, widths in (("queries x queries", counts), ("queries x sequence", lengths)):
        sizes[name] = [count * width for count, width in zip(counts, widths, strict=True)]
        if sum(sizes[name]) == tree_mask.numel():
            parts = tree_mask.bool().split(sizes[name])
            return [part.view(count, -1)[:, -count:] for part, count in zip(parts, counts, strict=True)]
    allowed = " or ".join(f"{sum(size)} ({name})" for name, size in sizes.items())
    raise ValueError(f"sgl_kernel on CPU: a tree mask of {tree_mask.numel()} cells; must have {allowed}")
