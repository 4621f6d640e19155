"""From router logits to the score P a row weighs by and the choice score C it ranks by."""

import math
from functools import cache

import torch
from torch.nn.functional import softplus

from ..types import Batch, Router

FIXED_ONE = 1 << 20
"""1 in fixed point: utilities and shares are sums of multiples of 1 / FIXED_ONE, exact in any order and backend."""
# Keeps 0 / 0 at 0 and changes no other quotient: every positive float32 is larger.
TINY = 1e-300
DEPTHS = 256
"""How many depths of a draft have a weight of their own; one beyond counts as the last."""


def compute_scores(logits: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
    """(P, C), both [n, N] float32, of logits [n, N] in any float dtype.

    P is the softmax over all experts, the sigmoid, or the root of softplus, ln(1 + e^x) (DeepSeek-V4). C is the logit
    itself, which never underflows, or P + bias with a correction bias. An expert that is never chosen (non-finite
    logit, outside the row's groups) has C = -inf, and P = 0 for a non-finite logit; but P is NaN in a softmax row
    without any finite logit.
    """
    logits = torch.nan_to_num(logits.float(), nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
    scores = score(logits, router.scoring)
    choice = logits
    if router.correction_bias is not None:
        biased = torch.nan_to_num(scores + router.correction_bias.float(), -math.inf, -math.inf, -math.inf)
        choice = biased.masked_fill_(logits == -math.inf, -math.inf)
    if router.num_expert_group is not None and router.topk_group is not None:
        choice = _limit_groups(choice, router.num_expert_group, router.topk_group, router.correction_bias is not None)
    return scores, choice


def score(logits: torch.Tensor, scoring: str) -> torch.Tensor:
    """P [n, N] float32 of logits in any float dtype, none of them NaN or +inf."""
    if scoring == "softmax":
        return logits.softmax(1, dtype=torch.float32)
    if scoring == "sigmoid":
        return logits.float().sigmoid()
    # In float32, torch's last bit depends on where in the tensor a number stands, and e^x underflows at -103.
    return softplus(logits.double()).sqrt_().float()


def measure(scores: torch.Tensor, router: Router) -> torch.Tensor:
    """P [n, N] as it is added up and compared with shares: as it is; of a scoring without an upper bound, over its sum
    in the row, in float64.
    """
    if router.scoring != "sqrtsoftplus":
        return scores
    wide = scores.double()
    return wide / wide.sum(1, keepdim=True).clamp_min_(TINY)


def to_fixed_point(scores: torch.Tensor) -> torch.Tensor:
    """P in multiples of 1 / FIXED_ONE, rounded to nearest (halves to even), as integers in float64, which sums them
    exactly in any order up to 2^53; 0 in a row without experts.
    """
    return (scores * FIXED_ONE).round_().nan_to_num_(nan=0.0).double()


def find_depth(batch: Batch, num_rows: int, device: torch.device) -> torch.Tensor:
    """[n] int32: the batch's, or a row's place in its request."""
    return _count_places(num_rows, batch.tokens_per_request, device) if batch.depth is None else batch.depth


@cache
def _count_places(num_rows: int, tokens_per_request: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(num_rows, dtype=torch.int32, device="cpu") % tokens_per_request).to(device)


def weigh_depths(acceptance: float) -> torch.Tensor:
    """[DEPTHS] float32: what a row's utility counts by, the chance that all drafts it follows on are accepted."""
    chances = [acceptance**depth for depth in range(DEPTHS)]
    return torch.tensor(chances, dtype=torch.float64, device="cpu").float()


def _limit_groups(choice: torch.Tensor, num_groups: int, topk_group: int, biased: bool) -> torch.Tensor:
    """C with -inf outside each row's best groups. A group scores the sum of its two best C if biased, else its best."""
    rows, num_experts = choice.shape
    grouped = choice.reshape(rows, num_groups, num_experts // num_groups)
    best = min(2, grouped.shape[2]) if biased else 1
    group_scores = grouped.topk(best, 2).values.sum(2)
    kept = group_scores.sort(dim=1, descending=True, stable=True).indices[:, :topk_group]
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(outside.unsqueeze(2), -math.inf).view(rows, num_experts)
