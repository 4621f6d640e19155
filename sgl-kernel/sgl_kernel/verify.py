"""Greedy verification of draft trees, and functions that record the accepted tokens."""

import torch
from torch import Tensor


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk down the tree of each request while a child contains the token that the target model chose.

    The function reads these arguments. `nodes` is the number of draft tokens of a request, and `retrive` is the
    spelling of SGLang's operator.

    * `candidates` [bs, nodes] is the token of each node.
    * `retrive_index`, `retrive_next_token` and `retrive_next_sibling` [bs, nodes] come from
      `build_tree_kernel_efficient_cpu`.
    * `target_predict` [bs, nodes] is the greedy token of the target model after each node.

    It writes these arguments:

    * `accept_index` [bs, longest path] contains the rows of the accepted nodes, the root first. Other entries are not
      modified.
    * `accept_token_num` [bs] is the number of accepted nodes without the root.
    * `predicts` [bs * nodes] is the next token of the target model at each accepted node. At the last one it is the
      bonus token.

    The walk follows a few pointers for each request, so it uses Python integers.
    """
    tokens, rows, first_child, next_sibling = (
        table.tolist() for table in (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    )
    target = target_predict.flatten()
    wanted = target.tolist()
    visited: list[int] = []
    for request, request_rows in enumerate(rows):
        path, node = request_rows[:1], 0
        while len(path) < accept_index.shape[1]:
            node = first_child[request][node]
            while node != -1 and tokens[request][node] != wanted[path[-1]]:
                node = next_sibling[request][node]
            if node == -1:
                break
            path.append(request_rows[node])
        accept_index[request, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
        accept_token_num[request] = len(path) - 1
        visited += path
    accepted_rows = torch.tensor(visited, dtype=torch.int64)
    predicts[accepted_rows] = target[accepted_rows].to(predicts.dtype)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Write the last accepted token of each request, which the target model has added.

    `accept_tokens` is [bs * accept_stride]. `accept_lens` [bs] is at least 1. `bonus_tokens` [bs] is modified.
    """
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens[: last.numel()] = accept_tokens.flatten()[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Write the KV slots of the accepted rows one after the other, in the order of `accept_index`.

    `accept_index` has any shape and contains rows of the verify batch, or -1 for no row. `out_cache_loc` is [rows].
    `accept_out_cache_loc` has at least one element for each accepted row. Further elements are not modified.
    """
    rows = accept_index.flatten()
    slots = out_cache_loc[rows[rows >= 0].long()]
    accept_out_cache_loc[: slots.numel()] = slots.to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift the tokens of each request left by one, and write its new token at the end (for multi-layer EAGLE).

    `input_ids` [tokens] is modified. `extend_start_loc` and `extend_seq_lens` are [bs]; a request of length 0 is
    skipped. `topk_index` contains bs new tokens. If `select_index` [bs] is given, the new tokens go to these rows
    instead of the last rows.
    """
    start, length = extend_start_loc.long(), extend_seq_lens.long()
    shifted = (length - 1).clamp(min=0)
    offset = torch.repeat_interleave(start - (shifted.cumsum(0) - shifted), shifted)
    row = torch.arange(offset.numel()) + offset
    input_ids[row] = input_ids[row + 1]
    last = start + length - 1 if select_index is None else select_index.long()
    input_ids[last[length > 0]] = topk_index.flatten()[length > 0].to(input_ids.dtype)
