"""From router logits to the score P a row weighs by and the choice score C it ranks by."""

from __future__ import annotations

import math

import torch

from ..types import Router

GRID = 1 << 20
"""Utilities and shares are sums of scores rounded to multiples of 1 / GRID: exact, so every order and backend agrees."""


def compute_scores(logits: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
    """(P, C), both [n, N] float32, of logits [n, N] in any float dtype.

    P is the softmax over all experts or the sigmoid. C is the logit itself, which never underflows, or P + bias with a
    correction bias. An expert never to be chosen (non-finite logit, outside the row's groups) has C = -inf; a non-finite
    logit has P = 0.
    """
    logits = torch.nan_to_num(logits.float(), nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
    # A row without any finite logit would be NaN.
    scores = logits.softmax(1).nan_to_num_(nan=0.0) if router.scoring == "softmax" else logits.sigmoid()
    choice = logits
    if router.correction_bias is not None:
        biased = torch.nan_to_num(scores + router.correction_bias.float(), -math.inf, -math.inf, -math.inf)
        choice = biased.masked_fill_(logits == -math.inf, -math.inf)
    if router.num_expert_group is not None and router.topk_group is not None:
        choice = _limit_groups(choice, router.num_expert_group, router.topk_group, router.correction_bias is not None)
    return scores, choice


def to_grid(scores: torch.Tensor) -> torch.Tensor:
    """Scores in [0, 1], float32 or float64, as int64 multiples of 1 / GRID, rounded to the nearest (halves to even)."""
    return (scores * GRID).round_().long()


def _limit_groups(choice: torch.Tensor, num_groups: int, topk_group: int, biased: bool) -> torch.Tensor:
    """C with -inf outside each row's best groups. A group scores the sum of its two best C with a bias, its best without."""
    rows, num_experts = choice.shape
    grouped = choice.view(rows, num_groups, num_experts // num_groups)
    best = min(2, grouped.shape[2]) if biased else 1
    group_scores = grouped.topk(best, 2).values.sum(2)
    kept = group_scores.sort(1, descending=True, stable=True).indices[:, :topk_group]
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(outside.unsqueeze(2), -math.inf).view(rows, num_experts)
