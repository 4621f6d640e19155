"""What each PTX instruction does to the lanes of a warp: PTX ISA, section "Instruction Set".

It has the instructions that Triton writes for the kernels of this package; another one is an error. An instruction is
compiled once, to a function of (warp, lanes it runs on): `transfer` has those that touch memory or other lanes.
Arithmetic is rounded to nearest, except in conversions and fma.rm; subnormals are kept where PTX flushes.
"""

import operator
from collections.abc import Callable

import numpy as np

from fake_gpu.ptx.module import TYPES, Instruction, Module
from fake_gpu.ptx.operands import LANES, Array, Handler, apply


def compile_instruction(i: Instruction, module: Module) -> Handler:
    """Return what an instruction does. Raises NotImplementedError for one that is unknown."""
    from fake_gpu.ptx.transfer import TRANSFERS

    if i.op == "bar":  # `machine` has a program's warps wait; the lanes of a warp meet anyway
        return lambda warp, mask: None
    if i.op in SIMPLE and i.mods and i.type.endswith("x2"):
        return _apply_to_halves(i, module)
    if i.op in SIMPLE:
        return apply(i, module, SIMPLE[i.op])
    if i.op not in TRANSFERS | BUILT:
        raise NotImplementedError(i.text)
    return (TRANSFERS | BUILT)[i.op](i, module)


def _apply_to_halves(i: Instruction, module: Module) -> Handler:
    """Of registers that each hold two numbers of 16 bits."""
    kind, function = TYPES[i.type.removesuffix("x2")], SIMPLE[i.op]

    def compute(*operands: Array) -> Array:
        return function(*(one.view(kind) for one in operands)).view(np.uint32)

    return apply(i, module, compute, *["b32"] * (len(i.args) - 1))


SIMPLE: dict[str, Callable[..., Array]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "xor", "neg")},
    "and": operator.and_,
    "or": operator.or_,
    "not": operator.invert,
    "abs": np.abs,
    "min": np.fmin,
    "max": np.fmax,
    "div": lambda a, b: np.divide(a, b, dtype=a.dtype),  # of integers an error
    "sqrt": np.sqrt,
    "ex2": lambda a: np.exp2(a.astype(np.float64)).astype(a.dtype),
    "cvta": lambda a: a,
    "popc": lambda a: np.array([int(x).bit_count() for x in a], np.uint32),
}


def _mul(i: Instruction, module: Module) -> Handler:
    """Multiply, and for mad add a third operand. Raises NotImplementedError for the upper half of a product."""
    if "hi" in i.mods:
        raise NotImplementedError(i.text)
    sum_type = i.type[0] + str(16 * TYPES[i.type].itemsize) if "wide" in i.mods else i.type
    kind = TYPES[sum_type]

    def multiply(a: Array, b: Array, *c: Array) -> Array:
        return sum(c, a.astype(kind) * b.astype(kind))

    return apply(i, module, multiply, i.type, i.type, sum_type)


def _fma(i: Instruction, module: Module) -> Handler:
    def fma(a: Array, b: Array, c: Array) -> Array:
        value = a.astype(np.float64) * b + c  # of two float32 the product is exact
        rounded = value.astype(a.dtype)
        return np.where(rounded > value, np.nextafter(rounded, -np.inf, dtype=a.dtype), rounded) if down else rounded

    down = "rm" in i.mods
    return apply(i, module, fma)


def _shift(i: Instruction, module: Module) -> Handler:
    bits = 8 * TYPES[i.type].itemsize
    function = np.left_shift if i.op == "shl" else np.right_shift
    signed = i.type[0] == "s"

    def shift(a: Array, by: Array) -> Array:
        moved = function(a, np.minimum(by, bits - 1).astype(a.dtype))
        return moved if signed else np.where(by < bits, moved, 0).astype(a.dtype)

    return apply(i, module, shift, i.type, "u32")


def _bfe(i: Instruction, module: Module) -> Handler:
    def extract(a: Array, first: Array, count: Array) -> Array:
        bits = [int(x) >> (int(p) & 255) & ((1 << (int(n) & 255)) - 1) for x, p, n in zip(a, first, count, strict=True)]
        if a.dtype.kind == "i":
            bits = [x - (1 << n) if n and x >> (n - 1) & 1 else x for x, n in zip(bits, map(int, count), strict=True)]
        return np.array(bits, a.dtype)

    return apply(i, module, extract, i.type, "u32", "u32")


def _prmt(i: Instruction, module: Module) -> Handler:
    def permute(a: Array, b: Array, chosen: Array) -> Array:
        raw = np.stack([a, b], 1).view(np.uint8)
        nibbles = chosen[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
        picked = np.take_along_axis(raw, (nibbles & 7).astype(int), 1)
        signs = np.where(picked & 0x80, 0xFF, 0).astype(np.uint8)
        return np.ascontiguousarray(np.where(nibbles & 8, signs, picked)).view(np.uint32).reshape(LANES)

    return apply(i, module, permute, "b32", "b32", "b32")


COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    **{name: getattr(operator, name) for name in ("eq", "lt", "le", "gt", "ge")},
    "ne": lambda a, b: (a < b) | (a > b),  # neither, of NaN
}


def _setp(i: Instruction, module: Module) -> Handler:
    """Compare. Raises NotImplementedError for a comparison combined with a predicate, or that writes two predicates."""
    if len(i.args) > 3 or "|" in i.args[0]:
        raise NotImplementedError(i.text)
    return apply(i, module, COMPARE[i.mods[0]])


def _selp(i: Instruction, module: Module) -> Handler:
    return apply(i, module, lambda a, b, p: np.asarray(np.where(p, a, b)), i.type, i.type, "pred")


ROUND: dict[str, Callable[[Array], Array]] = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}


def _cvt(i: Instruction, module: Module) -> Handler:
    to, source = i.mods[-2:]
    if source == "bf16":
        return apply(i, module, lambda a: (a.astype(np.uint32) << np.uint32(16)).view(np.float32), "u16")
    if to == "bf16":

        def narrow(a: Array) -> Array:
            bits = a.view(np.uint32).astype(np.uint64)
            return np.where(np.isnan(a), 0x7FFF, bits + 0x7FFF + (bits >> np.uint64(16) & 1) >> 16).astype(np.uint16)

        return apply(i, module, narrow, "f32")
    target = TYPES[to]
    rounded = next((ROUND[mod] for mod in i.mods if mod in ROUND), None)

    def convert(a: Array) -> Array:
        if rounded is not None:
            a = rounded(a)
        if target.kind == "f":
            out = a.astype(target)
            return np.nan_to_num(np.clip(out, 0, 1), nan=0.0) if "sat" in i.mods else out
        if a.dtype.kind == "f" or "sat" in i.mods:  # to the nearest that there is
            bounds = np.iinfo(target)
            finite = np.nan_to_num(a, nan=0.0) if a.dtype.kind == "f" else a
            return np.array([int(min(max(x, bounds.min), bounds.max)) for x in finite], target)
        return a.astype(target)

    return apply(i, module, convert, source)


BUILT: dict[str, Callable[[Instruction, Module], Handler]] = {
    **dict.fromkeys(("mul", "mad"), _mul),
    **dict.fromkeys(("shl", "shr"), _shift),
    **{"fma": _fma, "bfe": _bfe, "prmt": _prmt, "setp": _setp, "selp": _selp, "cvt": _cvt},
}
