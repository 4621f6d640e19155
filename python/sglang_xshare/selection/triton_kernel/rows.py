"""Device functions on a tile of rows: their scores, their choice keys, and the best of a row.

A tile is [R, E]: R rows (tokens) by E experts, both padded to powers of two. Every row lies in one warp, so a reduction
along the row needs no shared memory.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

EMPTY = tl.constexpr(-(2**31))
"""The key of an expert that may not be chosen (again), below the key of every float."""

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def exp(x) -> tl.tensor:
    """Return e^x fp32, rounded as torch rounds it on CUDA, but 0 below 2^-126.

    The compiled tl.exp rounds differently, and the interpreter has no other function.
    """
    return tl.exp(x) if INTERPRETED else libdevice.exp(x)


@triton.jit
def load_tile(
    rows, there, columns: tl.constexpr, other: tl.constexpr, start: tl.constexpr, width: tl.constexpr
) -> tl.tensor:
    """Load columns `start` to `start + width` of the rows at `rows` [R]: [R, width], `other` for absent elements."""
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
    """Return a tile [R, C] as [R * C]: Triton would lay unordered 2-D addresses out anew, through shared memory."""
    return tl.reshape(tile, (tile.shape[0] * tile.shape[1],))


@triton.jit
def load_listed(places, there) -> tl.tensor:
    """Load the elements at addresses [R, C] in any order: fp32, 0 for elements that are not `there` [R, C] bool."""
    return tl.reshape(tl.load(flatten(places), mask=flatten(there), other=0).to(tl.float32), there.shape)


@triton.jit
def halve(tile) -> tuple[tl.tensor, tl.tensor]:
    """Return the left and the right half of the columns of a tile [R, E]."""
    halves = tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))
    return tl.split(tl.permute(halves, (0, 2, 1)))


@triton.jit
def store_tile(rows, values, there, columns: tl.constexpr, start: tl.constexpr) -> None:
    """Store values [R, width] to columns `start` to `start + width` of the rows at `rows` [R].

    The values are stored 32 columns at a time, as they were loaded. A store of whole rows would first lay the values
    out anew, through shared memory.
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
    """Return int32 keys in the order of the fp32 values; -0 and 0 are equal."""
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
    """Return the root of ln(1 + e^x) [R, E] fp32; for x below -16 its limit e^(x / 2), which underflows later."""
    inner = tl.minimum(tl.maximum(logits, -16.0), 20.0)
    scores = tl.sqrt_rn(tl.where(logits > 20.0, logits, log1p(exp(inner))))
    return tl.where(logits < -16.0, exp(logits * 0.5), scores)


@triton.jit
def find_largest(logits) -> tl.tensor:
    """Return each row's largest logit: [R, 1] fp32, finite, so a row without finite logits scores 0."""
    return tl.maximum(from_keys(tl.max(to_keys(logits), 1)), -3.0e38)[:, None]


@triton.jit
def score_logits(logits, largest, recipe: tl.constexpr) -> tl.tensor:
    """Return P of logits [R, any]: fp32; of a softmax the multiple of P that is 1 at the row's `largest` [R, 1]."""
    if recipe.scoring == "sqrtsoftplus":
        scores = score_softplus(logits)
    elif recipe.scoring == "sigmoid":
        scores = tl.div_rn(1.0, 1.0 + exp(-logits))
    else:
        scores = exp(logits - largest)
    return scores


@triton.jit
def limit_groups(choice, keys, num_groups: tl.constexpr, topk_group: tl.constexpr, biased: tl.constexpr) -> tl.tensor:
    """Return which experts are in their row's best groups [R, E] bool.

    A group scores its best C, or with a bias the sum of its two best.

    `keys` are the keys of `choice`: a maximum of integers is one `redux`, a maximum of floats takes five steps.
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
    """Return the keys with the expert's index in the low bits, of which the fp32 of a 16-bit float leaves 13 free."""
    low: tl.constexpr = keys.shape[1] - 1
    return (keys & ~low) | (experts ^ low)[None, :]


@triton.jit
def read_expert(keys, size: tl.constexpr) -> tl.tensor:
    """Return the experts that unique keys contain: int32; `size` is the number of experts of a row."""
    return ~keys & (size - 1)


@triton.jit
def read_logits(keys, size: tl.constexpr, unique: tl.constexpr) -> tl.tensor:
    """Return the fp32 logits from keys without a bias; `size` is the number of experts of a row."""
    bits = from_keys(keys).to(tl.int32, bitcast=True)
    if unique:
        bits &= -size  # the low bits, which `make_unique` has set, are 0 in the logit
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def roll(rounds) -> tl.tensor:
    """Return the number of rounds, times a 1 that the compiler cannot see, which prevents unrolling.

    An unrolled loop of so few rounds would be slower: a decode step runs other kernels in between, so every instruction
    is fetched again.
    """
    return tl.num_programs(1) * rounds


@triton.jit
def begin_rest(keys, unique: tl.constexpr) -> tl.tensor:
    """Return the rest before the first key is taken: the keys [R, E], or for unique keys a bound of those left [R]."""
    return tl.full((keys.shape[0],), 2147483647, tl.int32) if unique else keys


@triton.jit
def take_best(keys, rest, experts, unique: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return each row's largest key of the rest and its expert [R], EMPTY if none is left, and the rest without it.

    Ties go to the lower expert. The largest unique key up to a bound has the smallest unsigned distance to the
    bound: two instructions a key instead of three, and only the bounds stay in registers.
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
    """Return which keys are no longer in the rest: [R, E] bool."""
    return keys > (rest[:, None] if unique else rest)


@triton.jit
def find_best(keys, experts, rounds, unique: tl.constexpr) -> tl.tensor:
    """Return which keys are each row's `rounds` largest, without those that are EMPTY: [R, E] bool."""
    rest = begin_rest(keys, unique)
    for _ in range(rounds):
        _, _, rest = take_best(keys, rest, experts, unique)
    return find_taken(keys, rest, unique)


@triton.jit
def list_next(
    keys, rest, experts, place, listed, listed_experts, unique: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take each row's largest key of the rest for column `place` of a list; see `list_best`."""
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
    """Take each row's largest keys, best first, for the columns `start` to `end` of a list.

    Returns the rest, the `listed` keys [R, C], EMPTY if none was left, and, if keys are not unique, the
    `listed_experts` [R, C] int32.
    """
    for place in range(start, end):
        rest, listed, listed_experts = list_next(keys, rest, experts, place, listed, listed_experts, unique)
    return rest, listed, listed_experts


@triton.jit
def keep_quota(keys, count: tl.constexpr, num_groups: tl.constexpr, unique: tl.constexpr) -> tl.tensor:
    """Return the keys [R, E] with EMPTY in place of all except the `count` largest of each group."""
    size: tl.constexpr = keys.shape[1] // num_groups
    parts = tl.reshape(keys, (keys.shape[0] * num_groups, size))
    return tl.reshape(tl.where(find_best(parts, tl.arange(0, size), count, unique), parts, EMPTY), keys.shape)


@triton.jit
def to_fixed_point(values, scale) -> tl.tensor:
    """Return fp32 values [R, E] times a scale, at most 2^22, as the nearest int32, halves to even."""
    # Around 1.5 * 2^23 an fp32 has no fraction, and its bits count up from 0x4B400000.
    return (values * scale + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
