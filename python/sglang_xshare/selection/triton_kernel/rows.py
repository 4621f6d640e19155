"""Device functions on a tile of rows: their scores, their choice keys, and the best of a row.

A tile is [R, E]: R rows (tokens) by E experts, both padded to powers of two. The launch gives every row one warp, so that a
reduction along a row needs no shared memory.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

EMPTY = tl.constexpr(-(2**31))
"""The key of an expert that is not to be chosen (again). Below that of every float."""

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def exp(x):
    """e^x fp32 as torch on CUDA rounds it, which compiled tl.exp does not; the interpreter has numpy's, and no libdevice."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def load_logits(rows, live, num_experts: tl.constexpr, start: tl.constexpr, width: tl.constexpr):
    """Experts `start` to `start + width` of every row: [R, width] fp32, -inf where not finite. `rows` [R] points at the rows."""
    # A warp loads 128 fp32 at once: a wider row would spread over several warps. Its parts, joined, stay in one.
    if width > 128:
        half: tl.constexpr = width // 2
        left = load_logits(rows, live, num_experts, start, half)
        right = load_logits(rows, live, num_experts, start + half, half)
        return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (left.shape[0], width))
    else:
        experts = start + tl.arange(0, width)
        there = live[:, None] & (experts < num_experts)[None, :]
        logits = tl.load(rows[:, None] + experts[None, :], mask=there, other=float("-inf")).to(tl.float32)
        return tl.where(tl.abs(logits) < float("inf"), logits, float("-inf"))


@triton.jit
def to_keys(values):
    """int32 in the order of the fp32 values; -0 and 0 are equal."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def from_keys(keys):
    """The fp32 values of `to_keys`."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def score_rows(logits, sigmoid: tl.constexpr, normalize: tl.constexpr):
    """P [R, E] fp32; of a softmax that need not `normalize`, a multiple of P: 1 at the row's largest logit."""
    if sigmoid:
        return tl.div_rn(1.0, 1.0 + exp(-logits))
    else:
        # A finite largest, so that a row without finite logits scores 0.
        largest = tl.maximum(from_keys(tl.max(to_keys(logits), 1)), -3.0e38)
        scores = exp(logits - largest[:, None])
        if normalize:
            total = tl.sum(scores, 1)
            scores = tl.div_rn(scores, tl.where(total > 0, total, 1.0)[:, None])
        return scores


@triton.jit
def limit_groups(choice, num_groups: tl.constexpr, topk_group: tl.constexpr, biased: tl.constexpr):
    """C [R, E] with -inf outside each row's best groups; with a bias a group scores its two best C, else its best."""
    size: tl.constexpr = choice.shape[1] // num_groups
    grouped = tl.reshape(choice, (choice.shape[0], num_groups, size))
    best = tl.max(grouped, 2)
    if biased and size > 1:
        place = tl.arange(0, size)[None, None, :]
        first = tl.min(tl.where(grouped == best[:, :, None], place, size), 2)
        best += tl.max(tl.where(place == first[:, :, None], float("-inf"), grouped), 2)
    group = tl.arange(0, num_groups)
    ahead = group[None, :, None] < group[None, None, :]
    better = (best[:, :, None] > best[:, None, :]) | ((best[:, :, None] == best[:, None, :]) & ahead)
    kept = tl.sum(better.to(tl.int32), 1) < topk_group
    return tl.reshape(tl.where(kept[:, :, None], grouped, float("-inf")), (choice.shape[0], choice.shape[1]))


@triton.jit
def make_unique(keys, experts):
    """Keys that the expert's index makes unique, for values of 16-bit floats, whose fp32 leaves the low 13 bits free."""
    low: tl.constexpr = keys.shape[1] - 1
    return (keys & ~low) | (low - experts)[None, :]


@triton.jit
def pop_best(keys, experts, unique: tl.constexpr):
    """(where each row has its largest key, the keys without it): [R, E] bool, int32. Ties to the lower expert.

    A row of EMPTY keys has no largest. Unique keys need no second reduction to find whose the largest is.
    """
    best = tl.max(keys, 1)[:, None]
    hit = (keys == best) & (keys > EMPTY)
    if not unique:
        first = tl.min(tl.where(hit, experts[None, :], keys.shape[1]), 1)
        hit = experts[None, :] == first[:, None]
    return hit, tl.where(hit, EMPTY, keys)


@triton.jit
def to_grid(values):
    """fp32 or fp64 in [0, 1] as int32 multiples of 2^-20, rounded to the nearest, halves to even."""
    # Adding 1.5 * 2^m, with m the mantissa's bits, leaves the rounded integer in the low bits.
    if values.dtype == tl.float64:
        return (values * 1048576.0 + 6755399441055744.0).to(tl.int64, bitcast=True).to(tl.int32)
    else:
        shifted = (values * 1048576.0 + 12582912.0).to(tl.int32, bitcast=True)
        return shifted - 0x4B400000
