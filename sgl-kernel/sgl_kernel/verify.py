"""Greedy verification of draft trees, and the bookkeeping of accepted tokens."""

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
    """Walk down each request's tree while some child is the token that the target model chose.

    Args, read (nodes = draft tokens a request; `retrive` is the spelling of SGLang's operator):
        candidates: [bs, nodes], token of each node.
        retrive_index, retrive_next_token, retrive_next_sibling: [bs, nodes], from `build_tree_kernel_efficient_cpu`.
        target_predict: [bs, nodes], the target model's greedy token after each node.
    Args, written:
        accept_index: [bs, longest path], rows of the accepted nodes, the root first; other entries are not modified.
        accept_token_num: [bs], accepted nodes, the root not counted.
        predicts: [bs * nodes], the target's next token at every accepted node; at the last node the bonus token.

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
    """Write every request's last accepted token, which the target model added.

    accept_tokens: [bs * accept_stride]; accept_lens: [bs], 1 or more; bonus_tokens: [bs], modified.
    """
    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens[: last.numel()] = accept_tokens.flatten()[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Pack the KV slots of the accepted rows, in order.

    accept_index: any shape, rows of the verify batch, -1 for no row; out_cache_loc: [rows];
    accept_out_cache_loc: [accepted rows] or longer, modified except for its tail.
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
    """Shift each request's tokens left by one and put its new token last (for multi-layer EAGLE).

    input_ids: [tokens], modified; extend_start_loc, extend_seq_lens: [bs], a request of length 0 is skipped;
    topk_index: bs new tokens; select_index: [bs], rows for the new tokens in place of the last ones.
    """
    start, length = extend_start_loc.long(), extend_seq_lens.long()
    shifted = (length - 1).clamp(min=0)
    offset = torch.repeat_interleave(start - (shifted.cumsum(0) - shifted), shifted)
    row = torch.arange(offset.numel()) + offset
    input_ids[row] = input_ids[row + 1]
    last = start + length - 1 if select_index is None else select_index.long()
    input_ids[last[length > 0]] = topk_index.flatten()[length > 0].to(input_ids.dtype)
