"""Two scores of router logits. P weighs a row's experts, and C ranks them."""

import math
from functools import cache

import torch
from torch.nn.functional import softplus

from ..types import Batch, Router

FIXED_ONE = 1 << 20
"""The number 1 in fixed point. Utilities and shares are sums of multiples of 1 / FIXED_ONE. These sums are exact in any
order and on every backend.
"""
# The smallest divisor. It turns 0 / 0 into 0 and changes no other quotient, because every positive float32 is larger.
TINY = 1e-300
DEPTHS = 256
"""The number of draft depths that have a factor of their own. A deeper draft token has the factor of the last depth."""


def compute_scores(logits: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (P, C), both [n, N] float32, for logits [n, N] in any float dtype.

    P is the softmax over all experts or the sigmoid. For DeepSeek-V4, P is the square root of softplus, ln(1 + e^x). C
    is the logit itself, which never underflows. If the router has a correction bias, C is P + bias.

    An expert is never chosen if its logit is not finite or if it is outside the row's groups. Its C is then -inf. P is
    0 for a logit that is not finite. P is NaN in a softmax row without any finite logit.
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
    """Return P [n, N] float32. The logits have any float dtype and must not contain NaN or +inf."""
    if scoring == "softmax":
        return logits.softmax(1, dtype=torch.float32)
    if scoring == "sigmoid":
        return logits.float().sigmoid()
    # In float32 the last bit of torch's result depends on the position in the tensor, and e^x underflows at -103.
    return softplus(logits.double()).sqrt_().float()


def measure(scores: torch.Tensor, router: Router) -> torch.Tensor:
    """Return the values of P [n, N] that are summed and compared with shares.

    Scores of `sqrtsoftplus` have no upper bound, so they are divided by their sum in the row, in float64. Other scores
    are unchanged.
    """
    if router.scoring != "sqrtsoftplus":
        return scores
    wide = scores.double()
    return wide / wide.sum(1, keepdim=True).clamp_min_(TINY)


def to_fixed_point(scores: torch.Tensor) -> torch.Tensor:
    """Return P in multiples of 1 / FIXED_ONE, as integers. Halves are rounded to the even integer.

    The result is 0 in a row without experts. The integers have dtype float64, whose sums are exact in any order up to
    2^53.
    """
    return (scores * FIXED_ONE).round_().nan_to_num_(nan=0.0).double()


def find_depth(batch: Batch, num_rows: int, device: torch.device) -> torch.Tensor:
    """Return the depth of each row [n] int32: the batch's `depth`, or the position of the row in its request."""
    return _count_places(num_rows, batch.tokens_per_request, device) if batch.depth is None else batch.depth


@cache
def _count_places(num_rows: int, tokens_per_request: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(num_rows, dtype=torch.int32, device="cpu") % tokens_per_request).to(device)


def weigh_depths(acceptance: float) -> torch.Tensor:
    """Return a tensor [DEPTHS] float32. A row's utility is multiplied by the factor of the row's depth.

    The factor is the chance that the draft token and all draft tokens before it are accepted.
    """
    chances = [acceptance**depth for depth in range(DEPTHS)]
    return torch.tensor(chances, dtype=torch.float64, device="cpu").float()


def _limit_groups(choice: torch.Tensor, num_groups: int, topk_group: int, biased: bool) -> torch.Tensor:
    """Return C, with -inf for every expert outside the row's best groups.

    The score of a group is its best C. If the router has a bias, the score is the sum of the two best C.
    """
    rows, num_experts = choice.shape
    grouped = choice.reshape(rows, num_groups, num_experts // num_groups)
    best = min(2, grouped.shape[2]) if biased else 1
    group_scores = grouped.topk(best, 2).values.sum(2)
    kept = group_scores.sort(dim=1, descending=True, stable=True).indices[:, :topk_group]
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(outside.unsqueeze(2), -math.inf).view(rows, num_experts)
