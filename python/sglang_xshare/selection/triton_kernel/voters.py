"""Device functions on who votes: the most confident rows of the batch, all of which one program must hold."""

import triton
import triton.language as tl

from .budgets import CONFIDENCE, MAX_VOTERS, MIN_VOTES, read_count, read_share
from .experts import keep_best
from .rows import to_grid


@triton.jit
def find_voters(scores: tl.tensor, live: tl.tensor, budgets: tl.tensor, tile: tl.constexpr) -> tl.tensor:
    """[R] bool: the most confident rows, at most `max_voters`; the most confident one where none is sure (Lynx 4.3)."""
    grid = to_grid(scores, 1048576.0)
    best, total = tl.max(grid, 1).to(tl.float64), tl.sum(grid, 1).to(tl.float64)
    sure = live & (total > 0) & (best >= total * read_share(budgets, CONFIDENCE))
    any_sure = tl.max(sure.to(tl.int32), 0) > 0
    share = (best / tl.maximum(total, 1)).to(tl.int64, bitcast=True)  # not negative: its bits are in its order
    share = tl.where(live & (sure | (any_sure == 0)), share, -1)
    row = tl.arange(0, tile.rows)
    ahead = (share[None, :] > share[:, None]) | ((share[None, :] == share[:, None]) & (row[None, :] < row[:, None]))
    place = tl.sum(ahead.to(tl.int32), 1)
    return (share >= 0) & (place < tl.where(any_sure, read_count(budgets, MAX_VOTERS), 1))


@triton.jit
def follow_voters(
    ballots: tl.tensor,
    utility: tl.tensor,
    selected: tl.tensor,
    budgets: tl.tensor,
    recipe: tl.constexpr,
    tile: tl.constexpr,
) -> tl.tensor:
    """S [E] bool with the experts that `min_votes` voters have in their top-k, then with the best by utility up to the
    model's top-k.
    """
    selected |= ballots >= read_count(budgets, MIN_VOTES)
    return selected | keep_best(
        tl.where(selected, 0, utility), recipe.top_k - tl.sum(selected.to(tl.int32), 0), tile.narrow
    )
