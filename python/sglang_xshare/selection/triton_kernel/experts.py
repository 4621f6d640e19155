"""Device functions on the batch's experts [E]: what the rows say about each, and which of them make up S."""

import triton
import triton.language as tl

# One int64 an expert sums up what the rows say about it, so that one reduction and one exchange carry everything: bits 0-31 its
# utility in multiples of 2^-20, 32-47 its votes (rows with it in their top-k), 48-62 its holders (rows or requests that bring it
# into S). Fewer than 2048 rows, so that no field overflows.
VOTE = tl.constexpr(1 << 32)
HOLDER = tl.constexpr(1 << 48)


@triton.jit
def compare(keys):
    """[E, E] bool: whether expert i (row) ranks before expert j (column) by its key [E] int64 >= 0, ties to the lower index."""
    size: tl.constexpr = keys.shape[0]
    unique = keys * size + (size - 1 - tl.arange(0, size))
    return unique[:, None] > unique[None, :]


@triton.jit
def keep_best(keys, limit):
    """[E] bool: the `limit` largest of the keys above 0."""
    return (keys > 0) & (tl.sum(compare(keys).to(tl.int32), 0) < limit)


@triton.jit
def select_experts(words, recipe: tl.constexpr):
    """S [E] bool: the experts that are held, and what the plan's budgets add by utility or votes."""
    utility = words & (VOTE - 1)
    selected = words >= HOLDER
    if recipe.by_votes:
        standing = words & (HOLDER - 1)
        retain = recipe.budget
        if recipe.drop is not None:
            retain = tl.sum((standing >= VOTE).to(tl.int32), 0) - recipe.drop
        selected |= keep_best(standing, tl.maximum(retain, recipe.top_k))
    elif recipe.budget is not None:
        selected |= keep_best(utility, recipe.budget)
    if recipe.add > 0:
        selected |= keep_best(tl.where(selected, 0, utility), recipe.add)
    if recipe.mass is not None:
        rest = tl.where(selected, 0, utility)
        total = tl.sum(utility, 0)
        before = tl.sum(tl.where(compare(rest), rest[:, None], 0), 0) + (total - tl.sum(rest, 0))
        selected |= (rest > 0) & (before.to(tl.float64) < tl.ceil(total.to(tl.float64) * recipe.mass))
    return selected


@triton.jit
def wait_for_all(arrivals, programs: tl.constexpr):
    """A barrier of all programs, which must run at once (a cooperative launch). `arrivals`: int32, 0 before its first use.

    The grid barrier of CUDA's cooperative groups: a barrier's increments add up to 2^31, so the last one flips the top bit and
    leaves the counter ready for the next launch, whatever its size.
    """
    tl.debug_barrier()
    step = tl.where(tl.program_id(0) == 0, 0x80000000 - (programs - 1), 1).to(tl.int32)
    before = tl.atomic_add(arrivals, step, sem="release")
    now = before
    while (before ^ now) >= 0:
        now = tl.atomic_add(arrivals, 0, sem="acquire")
    tl.debug_barrier()
