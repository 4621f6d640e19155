"""The draft tree of EAGLE speculation: who is whose parent, what each node may attend to, and where it stands.

A request's tree has `draft_token_num` nodes: node 0 is the root (the last token the target model gave), node i > 0 is the draft
token of candidate number `selected_index[i - 1]`. Candidates are numbered step by step, `topk` children for each expanded
candidate, so candidate c hangs from entry `c // topk` of the request's `parent_list`; entry 0 is the root.
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
    """Fill the verify batch's tree description for bs requests (EAGLE-2, arXiv 2406.16858, section 4; SGLang's layout).

    Read:
        parent_list: [bs, expanded candidates] int64, candidate number of each; may be empty (one step).
        selected_index: [bs, draft_token_num - 1] int64, the chosen candidates' numbers.
        verified_seq_len: [bs], tokens already in the KV cache.
    Written:
        tree_mask: flat bool. QLEN_ONLY: [bs, nodes, nodes]. FULL_MASK: for each request [nodes, seq_len + nodes], one after the
            other, whose first seq_len columns are the caller's. Node t sees node 0, itself and its ancestors.
        positions: [bs * nodes], seq_len + the node's depth.
        retrieve_index: [bs, nodes], the node's row in the flat verify batch.
        retrieve_next_token, retrieve_next_sibling: [bs, nodes], first child and next child of the same parent, or -1.

    A candidate whose parent was not selected is nobody's child. Raises NotImplementedError on a bit-packed mask.
    """
    if int(tree_mask_mode) not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(
            f"sgl_kernel on CPU: tree mask mode {int(tree_mask_mode)}; allowed: {FULL_MASK} (full), {QLEN_ONLY} (query by query)"
        )
    batch, nodes = verified_seq_len.numel(), draft_token_num
    if batch == 0:
        return
    parent = _parents(parent_list, selected_index, topk)
    visible, node_depth = _ancestors(parent, depth)

    positions[: batch * nodes] = (verified_seq_len[:, None] + node_depth).flatten().to(positions.dtype)
    retrieve_index.copy_(torch.arange(batch * nodes).view(batch, nodes))
    _link_children(parent, retrieve_next_token, retrieve_next_sibling)

    cell = torch.arange(batch * nodes * nodes).view(batch, nodes, nodes)
    if int(tree_mask_mode) == FULL_MASK:
        seq_len = verified_seq_len.long()
        before = (seq_len.cumsum(0) - seq_len) * nodes  # prefix columns of the requests before this one
        cell = cell + (before[:, None] + seq_len[:, None] * torch.arange(1, nodes + 1))[..., None]
    tree_mask[cell] = visible.to(tree_mask.dtype)


def _parents(parent_list: Tensor, selected_index: Tensor, topk: int) -> Tensor:
    """Parent node of each node: [bs, nodes] int64; -1 for the root and for a node whose parent was not selected."""
    entry = selected_index.long() // topk
    if parent_list.numel() == 0:  # a single step: every candidate hangs from the root
        candidate = torch.zeros_like(entry)
    else:
        candidate = parent_list.long().gather(1, entry)
    is_parent = selected_index[:, None, :] == candidate[:, :, None]  # [bs, child, possible parent]
    node = torch.where(is_parent.any(-1), is_parent.byte().argmax(-1) + 1, -1)
    node = torch.where(entry == 0, 0, node)
    return torch.cat([node.new_full((node.shape[0], 1), -1), node], dim=1)


def _ancestors(parent: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Walk up from every node at once, `depth` steps at most: visible [bs, nodes, nodes] bool, node depth [bs, nodes]."""
    batch, nodes = parent.shape
    visible = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
    visible[:, :, 0] = True
    current = torch.arange(nodes).repeat(batch, 1)
    node_depth = torch.zeros_like(current)
    for _ in range(depth):
        below_root = current > 0
        node_depth += below_root
        current = torch.where(below_root, current, 0)
        visible.scatter_(2, current[..., None], True)
        current = parent.gather(1, current)
    return visible, node_depth


def _link_children(parent: Tensor, next_token: Tensor, next_sibling: Tensor) -> None:
    """Write each node's first child and next sibling, in node order, -1 where there is none: both [bs, nodes]."""
    nodes = parent.shape[1]
    node = torch.arange(nodes)
    none = torch.full((), nodes)
    first_child = torch.where(parent[:, None, :] == node[:, None], node, none).amin(-1)
    is_younger_sibling = (parent[:, None, :] == parent[:, :, None]) & (parent >= 0)[:, :, None] & (node > node[:, None])
    sibling = torch.where(is_younger_sibling, node, none).amin(-1)
    next_token.copy_(first_child.masked_fill_(first_child == nodes, -1))
    next_sibling.copy_(sibling.masked_fill_(sibling == nodes, -1))
