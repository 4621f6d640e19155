"""Device functions for a tile of rows: their scores, their choice keys, and the best experts of a row.

A tile [R, E] has R rows (tokens) and E experts, both padded to powers of two. Every row is in one warp, so a reduction
along the row needs no shared memory.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

EMPTY = tl.constexpr(-(2**31))
"""The key of an expert that may not be chosen, or not chosen again. It is below the key of every float."""

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def exp(x) -> tl.tensor:
    """Return e^x in fp32, rounded as torch rounds it on CUDA. The result is 0 below 2^-126.

    The interpreter can only run tl.exp. Compiled code does not use tl.exp, because tl.exp rounds differently.
    """
    return tl.exp(x) if INTERPRETED else libdevice.exp(x)


@triton.jit
def load_tile(
    rows, there, columns: tl.constexpr, other: tl.constexpr, start: tl.constexpr, width: tl.constexpr
) -> tl.tensor:
    """Return the columns `start` to `start + width` of a tile: [R, width].

    `rows` [R] are the addresses of the rows. Elements that do not exist have the value `other`.
    """
    # A row that is loaded whole would be spread over several warps. A row that is loaded 32 columns at a time is not.
    if width > 32:
        half: tl.constexpr = width // 2
        left = load_tile(rows, there, columns, other, start, half)
        right = load_tile(rows, there, columns, other, start + half, half)
        tile = tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], width))
    else:
        column = start + tl.arange(0, width)
        mask = there[:, None] & (column < columns)[None, :]
        tile = tl.load(rows[:, None] + column[None, :], mask=mask, other=other)
    return tile


@triton.jit
def flatten(tile) -> tl.tensor:
    """Return a tile [R, C] in the shape [R * C].

    Triton would rearrange 2-D addresses without an order through shared memory.
    """
    return tl.reshape(tile, (tile.shape[0] * tile.shape[1],))


@triton.jit
def load_listed(places, there) -> tl.tensor:
    """Return the elements at the addresses `places` [R, C] in fp32. The addresses may have any order.

    `there` [R, C] bool marks the elements to load. All other elements are 0.
    """
    return tl.reshape(tl.load(flatten(places), mask=flatten(there), other=0).to(tl.float32), there.shape)


@triton.jit
def halve(tile) -> tuple[tl.tensor, tl.tensor]:
    """Return the left and the right half of the columns of a tile [R, E]."""
    halves = tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))
    return tl.split(tl.permute(halves, (0, 2, 1)))


@triton.jit
def store_tile(rows, values, there, columns: tl.constexpr, start: tl.constexpr) -> None:
    """Store values [R, width] to the columns `start` to `start + width` of a tile.

    `rows` [R] are the addresses of the rows. The values are stored 32 columns at a time, as they were loaded. A store
    of whole rows would first rearrange the values through shared memory.
    """
    width: tl.constexpr = values.shape[1]
    if width > 32:
        left, right = halve(values)
        store_tile(rows, left, there, columns, start)
        store_tile(rows, right, there, columns, start + width // 2)
    else:
        column = start + tl.arange(0, width)
        tl.store(rows[:, None] + column[None, :], values, mask=there[:, None] & (column < columns)[None, :])


@triton.jit
def to_keys(values) -> tl.tensor:
    """Return int32 keys that have the order of the fp32 values. -0 and 0 have equal keys."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_keys(keys) -> tl.tensor:
    """Return the fp32 values of keys, the inverse of `to_keys`."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def log1p(x) -> tl.tensor:
    """Return ln(1 + x) fp32 for x of at least e^-16. The interpreter has no log1p."""
    return tl.log(1.0 + x) * x / ((1.0 + x) - 1.0) if INTERPRETED else libdevice.log1p(x)


@triton.jit
def score_softplus(logits) -> tl.tensor:
    """Return the square root of ln(1 + e^x): [R, E] fp32.

    For x below -16 the result is the limit e^(x / 2), which underflows later.
    """
    inner = tl.minimum(tl.maximum(logits, -16.0), 20.0)
    scores = tl.sqrt_rn(tl.where(logits > 20.0, logits, log1p(exp(inner))))
    return tl.where(logits < -16.0, exp(logits * 0.5), scores)


@triton.jit
def find_largest(logits) -> tl.tensor:
    """Return the largest logit of each row: [R, 1] fp32.

    The result is always finite, so a row without finite logits has scores of 0.
    """
    return tl.maximum(from_keys(tl.max(to_keys(logits), 1)), -3.0e38)[:, None]


@triton.jit
def score_logits(logits, largest, recipe: tl.constexpr) -> tl.tensor:
    """Return P of logits [R, any] in fp32. For a softmax, return a multiple of P.

    This multiple is 1 for the largest logit of the row, `largest` [R, 1].
    """
    if recipe.scoring == "sqrtsoftplus":
        scores = score_softplus(logits)
    elif recipe.scoring == "sigmoid":
        scores = tl.div_rn(1.0, 1.0 + exp(-logits))
    else:
        scores = exp(logits - largest)
    return scores


@triton.jit
def limit_groups(choice, keys, num_groups: tl.constexpr, topk_group: tl.constexpr, biased: tl.constexpr) -> tl.tensor:
    """Return a mask [R, E] bool of the experts in the best groups of each row.

    The score of a group is its best C. With a bias the score is the sum of the two best C. `keys` are the keys of
    `choice`. The function compares keys, because a maximum of integers takes one `redux` and a maximum of floats takes
    five steps.
    """
    size: tl.constexpr = choice.shape[1] // num_groups
    grouped = tl.reshape(keys, (choice.shape[0], num_groups, size))
    first = tl.max(grouped, 2)
    best = from_keys(first)
    if biased and size > 1:
        ties = grouped == first[:, :, None]
        second = tl.max(tl.where(ties, EMPTY, grouped), 2)
        best += from_keys(tl.where(tl.sum(ties.to(tl.int32), 2) > 1, first, second))
    group = tl.arange(0, num_groups)
    ahead = group[None, :, None] < group[None, None, :]
    better = (best[:, :, None] > best[:, None, :]) | ((best[:, :, None] == best[:, None, :]) & ahead)
    kept = (tl.sum(better.to(tl.int32), 1) < topk_group)[:, :, None]
    return tl.reshape(tl.broadcast_to(kept, grouped.shape), choice.shape)


@triton.jit
def make_unique(keys, experts) -> tl.tensor:
    """Return the keys with the expert's index in the low bits.

    A 16-bit float that is converted to fp32 leaves at least 13 low bits free.
    """
    low: tl.constexpr = keys.shape[1] - 1
    return (keys & ~low) | (experts ^ low)[None, :]


@triton.jit
def read_expert(keys, size: tl.constexpr) -> tl.tensor:
    """Return the experts that unique keys contain, as int32. `size` is the number of experts of a row."""
    return ~keys & (size - 1)


@triton.jit
def read_logits(keys, size: tl.constexpr, unique: tl.constexpr) -> tl.tensor:
    """Return the fp32 logits that keys without a bias contain. `size` is the number of experts of a row."""
    bits = from_keys(keys).to(tl.int32, bitcast=True)
    if unique:
        bits &= -size  # the low bits, which `make_unique` has set, are 0 in the logit
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def roll(rounds) -> tl.tensor:
    """Return `rounds` in a form that prevents the compiler from unrolling a loop over them.

    The number is multiplied by a value that is always 1. The compiler does not know this. An unrolled loop of so few
    rounds would be slower. A decode step runs other kernels in between, so every instruction is fetched again.
    """
    return tl.num_programs(1) * rounds


@triton.jit
def begin_rest(keys, unique: tl.constexpr) -> tl.tensor:
    """Return the initial rest, when no key is taken yet. A rest describes the keys that are left.

    If keys are unique, the rest is an upper bound [R] of the keys that are left. Otherwise it is a copy of the keys [R,
    E].
    """
    return tl.full((keys.shape[0],), 2147483647, tl.int32) if unique else keys


@triton.jit
def take_best(keys, rest, experts, unique: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take the largest key of each row. Return this key [R], its expert [R], and the rest without the key.

    If no key is left, the returned key is EMPTY. The lower expert wins a tie. If keys are unique, the largest key up to
    a bound has the smallest unsigned distance to the bound. This takes two instructions for each key instead of three,
    and only the bounds stay in registers.
    """
    size: tl.constexpr = keys.shape[1]
    if unique:
        gap = tl.min((rest[:, None] - keys).to(tl.uint32, bitcast=True), 1)
        left = gap <= (rest - EMPTY).to(tl.uint32, bitcast=True)
        best = tl.where(left, rest - gap.to(tl.int32, bitcast=True), EMPTY)
        expert = read_expert(best, size)
        rest = tl.maximum(best, EMPTY + 1) - 1
    else:
        best = tl.max(rest, 1)
        expert = tl.min(tl.where(rest == best[:, None], experts[None, :], size), 1)
        hit = experts[None, :] == tl.where(best > EMPTY, expert, size)[:, None]
        rest = tl.where(hit, EMPTY, rest)
    return best, expert, rest


@triton.jit
def find_taken(keys, rest, unique: tl.constexpr) -> tl.tensor:
    """Return a mask [R, E] bool of the keys that are no longer in the rest."""
    return keys > (rest[:, None] if unique else rest)


@triton.jit
def find_best(keys, experts, rounds, unique: tl.constexpr) -> tl.tensor:
    """Return a mask [R, E] bool of the `rounds` largest keys of each row. EMPTY keys are not marked."""
    rest = begin_rest(keys, unique)
    for _ in range(rounds):
        _, _, rest = take_best(keys, rest, experts, unique)
    return find_taken(keys, rest, unique)


@triton.jit
def list_next(
    keys, rest, experts, place, listed, listed_experts, unique: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take the largest key of each row for the column `place` of a list; see `list_best`."""
    column = tl.arange(0, listed.shape[1])[None, :]
    best, expert, rest = take_best(keys, rest, experts, unique)
    listed = tl.where(column == place, best[:, None], listed)
    if not unique:
        listed_experts = tl.where(column == place, expert[:, None], listed_experts)
    return rest, listed, listed_experts


@triton.jit
def list_best(
    keys, rest, experts, start, end, listed, listed_experts, unique: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take the largest keys of each row, best first, for the columns `start` to `end` of a list.

    Return the rest, the `listed` keys [R, C] and the `listed_experts` [R, C] int32. A listed key is EMPTY if no key was
    left. If keys are unique, `listed_experts` is unchanged, because the keys contain the experts.
    """
    for place in range(start, end):
        rest, listed, listed_experts = list_next(keys, rest, experts, place, listed, listed_experts, unique)
    return rest, listed, listed_experts


@triton.jit
def keep_quota(keys, count: tl.constexpr, num_groups: tl.constexpr, unique: tl.constexpr) -> tl.tensor:
    """Return the keys [R, E] in which each group keeps its `count` largest keys. All other keys are EMPTY."""
    size: tl.constexpr = keys.shape[1] // num_groups
    parts = tl.reshape(keys, (keys.shape[0] * num_groups, size))
    return tl.reshape(tl.where(find_best(parts, tl.arange(0, size), count, unique), parts, EMPTY), keys.shape)


@triton.jit
def to_fixed_point(values, scale) -> tl.tensor:
    """Multiply fp32 values [R, E] by a scale, and return the nearest int32. Halves are rounded to even.

    The products must be at most 2^22.
    """
    # Around 1.5 * 2^23 an fp32 has no fraction, and its bits count up from 0x4B400000.
    return (values * scale + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
