"""Device functions on the batch's experts [E]: what the rows say about each, and which of them make up S."""

import triton
import triton.language as tl

# One int64 an expert sums up what the rows say about it, so that one reduction and one exchange carry everything: bits
# 0-31 its utility in multiples of 2^-20, 32-47 its votes (rows with it in their top-k), 48-62 its holders (rows or
# requests that bring it into S). Fewer than 2048 rows, so that no field overflows.
VOTE = tl.constexpr(1 << 32)
HOLDER = tl.constexpr(1 << 48)


@triton.jit
def compare(keys: tl.tensor, narrow: tl.constexpr) -> tl.tensor:
    """[E, E] int: -1 where expert j (column) ranks before expert i (row) by its key [E] int64 >= 0, 0 elsewhere.

    Ties rank by index. `narrow` says that all keys, but one that is alone, fit 31 bits together with an index.
    """
    size: tl.constexpr = keys.shape[0]
    unique = keys * size + (size - 1 - tl.arange(0, size))
    if narrow:
        unique = tl.minimum(unique, 0x7FFFFFFF).to(tl.int32)
    # The sign of a difference: summed comparisons would become popcounts, of twice as many instructions.
    return (unique[:, None] - unique[None, :]) >> (unique.dtype.primitive_bitwidth - 1)


@triton.jit
def keep_best(keys: tl.tensor, limit: tl.tensor, narrow: tl.constexpr) -> tl.tensor:
    """[E] bool: the `limit` largest of the keys above 0."""
    return (keys > 0) & (tl.sum(compare(keys, narrow).to(tl.int32) & 1, 1) < limit)


@triton.jit
def balance_ranks(
    utility: tl.tensor, selected: tl.tensor, rank: tl.tensor, recipe: tl.constexpr, tile: tl.constexpr
) -> tl.tensor:
    """[E] bool: what the expert-parallel ranks add to S (XShare, Algorithm 5; or our `fill`), without its loops.

    An expert's round is its position among those left of its rank. Its round takes place if S, with all experts of
    earlier rounds, is still below the total target.
    """
    rest = tl.where(selected, 0, utility)
    together = rank[:, None] == rank[None, :]
    turn = tl.sum(tl.where(together, compare(rest, tile.narrow).to(tl.int32) & 1, 0), 1)
    if recipe.fill_ranks:
        load = tl.sum((together & selected[None, :]).to(tl.int32), 1)
        room = load + turn < recipe.target_per_rank
    else:
        earlier = tl.sum(((rest > 0)[None, :] & (turn[None, :] < turn[:, None])).to(tl.int32), 1)
        total = recipe.target_per_rank * (tl.max(rank, 0) + 1)
        room = tl.sum(selected.to(tl.int32), 0) + earlier < total
    return (rest > 0) & room


@triton.jit
def select_experts(words: tl.tensor, rank: tl.tensor, recipe: tl.constexpr, tile: tl.constexpr) -> tl.tensor:
    """S [E] bool: the experts that are held, and what the plan's budgets add by utility or votes.

    `rank` [E] is the experts' expert-parallel rank where the plan balances ranks, else None.
    """
    utility = words & (VOTE - 1)
    selected = words >= HOLDER
    standing = words & (HOLDER - 1)  # votes, and utility below them
    if recipe.drop is not None:
        retain = tl.maximum(tl.sum((standing >= VOTE).to(tl.int32), 0) - recipe.drop, recipe.top_k)
        selected |= keep_best(standing, retain, False)
    elif recipe.budget is not None and recipe.by_votes:
        selected |= keep_best(standing, recipe.budget, False)
    elif recipe.budget is not None:
        selected |= keep_best(utility, recipe.budget, tile.narrow)
    if recipe.add > 0:
        selected |= keep_best(tl.where(selected, 0, utility), recipe.add, tile.narrow)
    if recipe.mass is not None:
        rest = tl.where(selected, 0, utility)
        total = tl.sum(utility, 0)
        before = tl.sum(compare(rest, tile.narrow) & rest[None, :], 1) + (total - tl.sum(rest, 0))
        selected |= (rest > 0) & (before.to(tl.float64) < tl.ceil(total.to(tl.float64) * recipe.mass))
    if recipe.target_per_rank is not None:
        selected |= balance_ranks(utility, selected, rank, recipe, tile)
    return selected


@triton.jit
def wait_for_all(arrivals: tl.tensor, programs: tl.constexpr) -> None:
    """A barrier of all programs, which must be resident together (a cooperative launch).

    `arrivals` points at an int32, 0 before its first use. As in the grid barrier of CUDA's cooperative groups, the
    increments of one barrier add up to 2^31: the last flips the top bit, and the next launch, of any size, can follow.
    """
    tl.debug_barrier()
    step = tl.where(tl.program_id(0) == 0, 0x80000000 - (programs - 1), 1).to(tl.int32)
    before = tl.atomic_add(arrivals, step, sem="release")
    now = before
    while (before ^ now) >= 0:
        now = tl.atomic_add(arrivals, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def is_last(done: tl.tensor, programs: tl.constexpr) -> tl.tensor:
    """Whether all other programs have come here before: this one sees what they stored.

    `done` points at an int32, 0 before and after.
    """
    tl.debug_barrier()
    last = tl.atomic_add(done, 1, sem="acq_rel") == programs - 1
    if last:
        tl.store(done, 0)
    tl.debug_barrier()
    return last
