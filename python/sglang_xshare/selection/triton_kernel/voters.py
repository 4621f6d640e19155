"""Device functions for voters: the most confident rows of the batch, over all programs (Lynx 4.3)."""

import triton
import triton.language as tl

from .budgets import CONFIDENCE, MAX_VOTERS, MIN_VOTES, read_count, read_share
from .experts import keep_best
from .ranking import measure

SURE = tl.constexpr(1 << 62)


@triton.jit
def measure_confidence(scores, live, budgets, recipe: tl.constexpr) -> tl.tensor:
    """Return keys [R] int64 that order the rows by confidence.

    The key of a row that is confident enough is at least SURE. The key of a row that may not vote is -1.
    """
    fixed = measure(scores, recipe)
    best, total = tl.max(fixed, 1).to(tl.float64), tl.sum(fixed, 1).to(tl.float64)
    sure = (total > 0) & (best >= total * read_share(budgets, CONFIDENCE))
    share = (best / tl.maximum(total, 1)).to(tl.int64, bitcast=True)  # its bits have the order of the shares
    return tl.where(live, tl.where(sure, share + SURE, share), -1)


@triton.jit
def find_voters(confidence, row, confidences, num_rows, budgets) -> tl.tensor:
    """Return a mask [R] bool of the rows that vote: the confident rows, but at most the `max_voters` most confident.

    `confidences` [n] contains the keys of all rows. If no row is confident enough, only the most confident row votes.
    """
    place = tl.arange(0, 32)
    top = tl.full((), -1, tl.int64)
    ahead = tl.full((row.shape[0], 32), 0, tl.int32)
    for start in range(0, num_rows, 32):
        others = tl.load(confidences + start + place, mask=start + place < num_rows, other=-1)
        top = tl.maximum(top, tl.max(others, 0))
        tied = (others[None, :] == confidence[:, None]) & ((start + place)[None, :] < row[:, None])
        ahead += ((others[None, :] > confidence[:, None]) | tied).to(tl.int32)
    limit = tl.where(top >= SURE, read_count(budgets, MAX_VOTERS), 1)
    return (confidence >= tl.where(top >= SURE, SURE, 0)) & (tl.sum(ahead, 1) < limit)


@triton.jit
def follow_voters(ballots, utility, selected, budgets, recipe: tl.constexpr) -> tl.tensor:
    """Return S [E] bool with the experts that have at least `min_votes` votes.

    If S then has fewer experts than the model's top-k, the best other experts by utility join S.
    """
    selected |= ballots >= read_count(budgets, MIN_VOTES)
    missing = recipe.top_k - tl.sum(selected.to(tl.int32), 0)
    return selected | keep_best(tl.where(selected, 0, utility), missing)
