"""Attention over the paged KV cache: one decode token a request, or several (prefill, draft and verify batches).

Requests are batched by their number of queries and, within a factor of two, by their length; keys are padded to the longest of
a batch and masked. Everything is computed in float32, so that masked and unmasked batches round alike: with bfloat16 inside,
speculative decoding would not give the tokens that plain decoding gives.
"""

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor


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
    """Scaled dot-product attention of each request's last `query_lens[i]` tokens over all its `seq_lens[i]` tokens.

    query: [tokens, heads, head size]; output: [tokens, heads, value size], modified; k_buffer, v_buffer: [slots, KV heads, size],
    where heads is a multiple of KV heads; req_to_token: [pool size, positions]; req_pool_indices, seq_lens, query_lens,
    query_start: [bs]. `scale` multiplies the scores; `k_scale` and `v_scale` undo the cache's quantization.

    `tree_mask`, flat bool, replaces the causal order among a request's queries. Either [bs, queries, queries], the prefix being
    visible to all, or for each request [queries, sequence], one after the other. Its size tells which.
    A request without tokens gets zeros.
    """
    lengths, counts, starts = seq_lens.tolist(), query_lens.tolist(), query_start.tolist()
    masks = [None] * len(lengths) if tree_mask is None else _split_tree_mask(tree_mask, lengths, counts)

    batches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for request, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        batches[count, length.bit_length()].append(request)

    for (count, _), requests in batches.items():
        rows = torch.tensor([starts[request] for request in requests])[:, None] + torch.arange(count)
        longest = max(lengths[request] for request in requests)
        if longest == 0:
            output[rows] = 0
            continue
        length = seq_lens[requests].long()[:, None]  # [requests, 1]
        column = torch.arange(longest)
        # A padding column repeats the request's last token: nothing of another request is read, whatever it holds.
        slots = req_to_token[req_pool_indices[requests].long()[:, None], column.minimum(length - 1)].long()
        visible = (column < length)[:, None, :]
        if causal:
            position = length - count + torch.arange(count)
            visible = column <= position[:, :, None]
        for place, request in enumerate(requests):
            mask = masks[request]
            if mask is not None:
                visible[place, :, lengths[request] - mask.shape[1] : lengths[request]] = mask
        output[rows] = _attend(query[rows], k_buffer[slots], v_buffer[slots], visible, scale * k_scale, v_scale).to(output.dtype)


def _split_tree_mask(tree_mask: Tensor, lengths: list[int], counts: list[int]) -> list[Tensor]:
    """Cut a flat mask into one [queries, columns] mask a request, the columns being the last ones of its sequence."""
    for columns in (counts, lengths):
        sizes = [count * width for count, width in zip(counts, columns, strict=True)]
        if sum(sizes) == tree_mask.numel():
            return [m.view(c, -1).bool() for m, c in zip(tree_mask.split(sizes), counts, strict=True)]
    expected = [sum(c * w for c, w in zip(counts, columns, strict=True)) for columns in (counts, lengths)]
    raise ValueError(
        f"sgl_kernel on CPU: tree mask of {tree_mask.numel()} cells; allowed: {expected[0]} (queries x queries) "
        f"or {expected[1]} (queries x sequence)"
    )


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, v_scale: float) -> Tensor:
    """Grouped-query attention of one padded batch, in float32.

    query: [requests, queries, heads, size]; key, value: [requests, columns, KV heads, size]; visible: [requests, queries, columns].
    Returns [requests, queries, heads, value size] float32.
    """
    query, key, value = (x.float().transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible[:, None], scale=scale, enable_gqa=True)
    return out.transpose(1, 2) * v_scale
