"""Greedy verification of draft trees, and the bookkeeping of what was accepted."""

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
    """Walk each request's tree from the root for as long as some child is the token the target model chose there.

    Read (nodes = draft tokens a request; `retrive` is the spelling of SGLang's operator):
        candidates: [bs, nodes], draft token of each node.
        retrive_index, retrive_next_token, retrive_next_sibling: [bs, nodes], as `build_tree_kernel_efficient_cpu` fills them.
        target_predict: [bs, nodes], the target model's greedy token after each node.
    Written:
        accept_index: [bs, depth + 1], rows of the accepted nodes, root first; entries beyond are left alone.
        accept_token_num: [bs], accepted draft tokens, the root not counted.
        predicts: [bs * nodes], the target's token at every accepted node: its child's, and the bonus token at the last.

    The walk follows pointers, a few steps for each request, so it runs on Python integers.
    """
    batch, nodes = candidates.shape
    tokens, rows, first_child, sibling = (
        table.tolist() for table in (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    )
    target = target_predict.flatten()
    target_token = target.tolist()
    accepted: list[list[int]] = []
    for request in range(batch):
        path = [rows[request][0]]
        node = 0
        while len(path) < accept_index.shape[1]:
            node = first_child[request][node]
            while node != -1 and tokens[request][node] != target_token[path[-1]]:
                node = sibling[request][node]
            if node == -1:
                break
            path.append(rows[request][node])
        accepted.append(path)

    for request, path in enumerate(accepted):
        accept_index[request, : len(path)] = torch.tensor(path, dtype=accept_index.dtype)
    accept_token_num.copy_(torch.tensor([len(path) - 1 for path in accepted]))
    visited = torch.tensor([row for path in accepted for row in path], dtype=torch.int64)
    predicts[visited] = target[visited].to(predicts.dtype)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int) -> None:
    """Pick every request's last accepted token: the one the target model added.

    accept_tokens: [bs * accept_stride] (or [bs, accept_stride]); accept_lens: [bs], at least 1; bonus_tokens: [bs], modified.
    """
    batch = accept_lens.numel()
    last = torch.arange(batch) * accept_stride + accept_lens.long() - 1
    bonus_tokens[:batch] = accept_tokens.flatten()[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """Pack the KV slots of accepted rows: `out_cache_loc[i]` for every i >= 0 of `accept_index`, in order.

    accept_index: any shape, -1 where nothing was accepted; accept_out_cache_loc: at least that many, modified, its tail left alone.
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
    """Shift each request's tokens left by one and put its new token last (multi-layer EAGLE: the next layer's input).

    input_ids: [tokens], modified; extend_start_loc, extend_seq_lens: [bs]; topk_index: [bs] or [bs, 1] new tokens;
    select_index: [bs], where the new token goes instead of the last place.
    """
    start, lengths = extend_start_loc.long(), extend_seq_lens.long()
    moved = (lengths - 1).clamp(min=0)
    first = torch.repeat_interleave(start - moved.cumsum(0) + moved, moved)
    target = torch.arange(int(moved.sum())) + first
    input_ids[target] = input_ids[target + 1]
    place = start + lengths - 1 if select_index is None else select_index.long()
    kept = lengths > 0
    input_ids[place[kept]] = topk_index.flatten()[kept].to(input_ids.dtype)
