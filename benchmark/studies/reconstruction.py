"""What MoE outputs lose without some experts, for whole orders of experts at once (MoE-Spec, equation 6)."""

from typing import Any

import torch


@torch.inference_mode()
def gram_of(block: Any, hidden: torch.Tensor, logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """[steps, experts, experts] float32: inner products, summed over the rows of a step, of what any two experts add to
    the rows' outputs; `hidden` [steps, rows, hidden] and `logits` [steps, rows, experts] are the block's. Weights are
    the rows' own top-k, renormalized.

    The squared error of a step without the experts of a set is the sum of its Gram matrix over that set.
    """
    steps, rows, experts = logits.shape
    weights, ids = logits.softmax(-1).topk(top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    flat, one = hidden.flatten(0, 1), torch.ones(len(hidden.flatten(0, 1)), 1)
    outputs = torch.empty(len(flat), top_k, flat.shape[1])
    for slot in range(top_k):
        outputs[:, slot] = block.experts(flat, ids.view(-1, top_k)[:, slot : slot + 1], one)
    outputs *= weights.view(-1, top_k, 1)
    products = outputs @ outputs.transpose(1, 2)  # [rows, k, k]
    flat_ids = ids.view(-1, top_k)
    place = flat_ids[:, :, None] * experts + flat_ids[:, None, :]
    step = torch.arange(steps).repeat_interleave(rows)[:, None, None] * experts**2
    gram = torch.zeros(steps * experts**2)
    gram.index_add_(0, (place + step).flatten(), products.flatten())
    return gram.view(steps, experts, experts)


def greedy_order(gram: torch.Tensor) -> torch.Tensor:
    """[steps, experts] int64: the oracle's order, which adds in turn the expert that leaves the smallest error."""
    steps, experts = gram.shape[:2]
    missing = torch.ones(steps, experts)
    order = torch.empty(steps, experts, dtype=torch.int64)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    for place in range(experts):
        # Without expert j in the missing set, the sum over that set falls by 2 (G m)_j - G_jj.
        gain = 2 * (gram @ missing[:, :, None]).squeeze(2) - diagonal
        best = gain.masked_fill(missing == 0, -torch.inf).argmax(1)
        order[:, place] = best
        missing.scatter_(1, best[:, None], 0)
    return order


def errors_along(gram: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[experts + 1] float32: the squared error with the first 0, 1, .. experts of each step's order, over the error
    with none, mean of the steps.
    """
    steps, experts = order.shape
    sorted_gram = gram.gather(1, order[:, :, None].expand(-1, -1, experts))
    sorted_gram = sorted_gram.gather(2, order[:, None, :].expand(-1, experts, -1))
    # The sum over the lower right corner from each place on.
    corner = sorted_gram.flip(1, 2).cumsum(1).cumsum(2).flip(1, 2).diagonal(dim1=1, dim2=2)
    corner = torch.cat([corner, torch.zeros(steps, 1)], 1)
    return (corner / corner[:, :1].clamp(min=1e-12)).mean(0)
