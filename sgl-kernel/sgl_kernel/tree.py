"""The draft tree of EAGLE speculation: the parent, the visible nodes and the position of each node.

The tree of a request has `draft_token_num` nodes. Node 0 is the root, which is the last token of the target model. Each
node i after the root is the candidate `selected_index[i - 1]` of the draft model. Candidates are numbered in the order
in which they are made, with `topk` children of one parent at a time. The parent of candidate c is therefore entry `c //
topk` of the request's `parent_list`. Entry 0 of this list is the root.
"""

import torch
from torch import Tensor

FULL_MASK, QLEN_ONLY = 0, 1  # sglang.srt.speculative.eagle_utils.TreeMaskMode


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Describe the draft trees of a verify batch (EAGLE-2, arXiv 2406.16858, section 4).

    The layout is that of SGLang's CUDA kernel. The function reads these arguments:

    * `parent_list` [bs, expanded candidates] int64 is the number of each expanded candidate. It has no columns if the
      tree has one step.
    * `selected_index` [bs, draft_token_num - 1] int64 is the candidate number of each node.
    * `verified_seq_len` [bs], called `seq_len` below, is the number of tokens in the KV cache.
    * `depth` is the number of steps of the longest path from the root.

    It writes these arguments, in which `nodes` is `draft_token_num`:

    * `tree_mask` is a flat bool tensor. A node sees the root, its ancestors and itself. With QLEN_ONLY the mask is [bs,
      nodes, nodes]. With FULL_MASK it is [nodes, seq_len + nodes] for one request after the other. The first seq_len
      columns are not modified.
    * `positions` [bs * nodes] is seq_len plus the depth of the node.
    * `retrieve_index` [bs, nodes] is the row of the node in the flat verify batch.
    * `retrieve_next_token` [bs, nodes] is the first child of the node. `retrieve_next_sibling` [bs, nodes] is the next
      child of the same parent. Both are -1 if there is no such node.

    A candidate whose parent was not selected is not a child of any node. Raises NotImplementedError for a bit-packed
    mask.
    """
    mode = int(tree_mask_mode)
    if mode not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"sgl_kernel on CPU: tree mask mode {mode}; must be {FULL_MASK} or {QLEN_ONLY}")
    batch, nodes = verified_seq_len.numel(), draft_token_num
    seq_len = verified_seq_len.long()
    parent = _parents(parent_list, selected_index, topk)
    visible, node_depth = _ancestors(parent, depth)

    positions[: batch * nodes] = (seq_len[:, None] + node_depth).flatten().to(positions.dtype)
    retrieve_index.copy_(torch.arange(batch * nodes).view(batch, nodes))
    _link_children(parent, retrieve_next_token, retrieve_next_sibling)

    cell = torch.arange(batch * nodes * nodes).view(batch, nodes, nodes)
    if mode == FULL_MASK:  # every row starts with the prefix of its request
        earlier_prefixes = (seq_len.cumsum(0) - seq_len) * nodes
        own_prefixes = seq_len[:, None] * torch.arange(1, nodes + 1)
        cell = cell + (earlier_prefixes[:, None] + own_prefixes)[..., None]
    tree_mask[cell] = visible.to(tree_mask.dtype)


def _parents(parent_list: Tensor, selected_index: Tensor, topk: int) -> Tensor:
    """Return the parent of each node [bs, nodes] int64. The root and nodes without a selected parent have -1."""
    entry = selected_index.long() // topk
    if parent_list.shape[-1] == 0:
        parent_list = torch.zeros_like(entry[:, :1])  # every entry is 0, the root, so no element is used
    candidate = parent_list.long().gather(1, entry)
    is_parent = selected_index[:, None, :] == candidate[:, :, None]  # [bs, child, possible parent]
    node = torch.where(is_parent.any(-1), is_parent.byte().argmax(-1) + 1, -1)
    node = torch.where(entry == 0, 0, node)
    return torch.cat([node.new_full((node.shape[0], 1), -1), node], dim=1)


def _ancestors(parent: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return the visible nodes of each node [bs, nodes, nodes] and the depth of each node [bs, nodes].

    The function follows the parents for `depth` steps.
    """
    batch, nodes = parent.shape
    visible = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
    visible[:, :, 0] = True
    current = torch.arange(nodes).repeat(batch, 1)
    node_depth = torch.zeros_like(current)
    for _ in range(depth):
        current = current.clamp(min=0)  # a walk that has reached the root stays there
        node_depth += current > 0
        visible.scatter_(2, current[..., None], True)
        current = parent.gather(1, current)
    return visible, node_depth


def _link_children(parent: Tensor, next_token: Tensor, next_sibling: Tensor) -> None:
    """Write the first child and the next sibling of each node, both [bs, nodes]. -1 means that there is none."""
    nodes = parent.shape[1]
    node = torch.arange(nodes)
    none = torch.tensor(nodes)
    is_child = parent[:, None, :] == node[:, None]  # [bs, parent, child]
    is_next = (parent[:, None, :] == parent[:, :, None]) & (parent >= 0)[:, :, None] & (node > node[:, None])
    for out, candidates in ((next_token, is_child), (next_sibling, is_next)):
        first = torch.where(candidates, node, none).amin(-1)
        out.copy_(torch.where(first == none, -1, first))
