"""What each PTX instruction does to the lanes of a warp: PTX ISA, section "Instruction Set".

An instruction is compiled once, to a function of (warp, lanes it runs on): `transfer` has those that touch memory or
other lanes. Arithmetic is rounded to nearest, but for conversions and fma.rm; subnormals are kept where PTX flushes.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from fake_gpu.ptx.module import TYPES, Instruction, Module
from fake_gpu.ptx.operands import LANES, Array, Handler, apply, read, write

NOTHING = {"griddepcontrol", "fence", "membar", "nanosleep", "bar"}
"""Orders memory, waits, or meets in a warp: launches are in order here, and lanes meet anyway."""


def compile_instruction(i: Instruction, module: Module) -> Handler:
    """Raises NotImplementedError, when it is run, for an instruction that is not known."""
    from fake_gpu.ptx.transfer import TRANSFERS

    if i.op in NOTHING:
        return lambda warp, mask: None
    if i.op in TRANSFERS:
        return TRANSFERS[i.op](i, module)
    if i.op in SIMPLE and i.mods and i.type.endswith("x2"):
        return _apply_to_halves(i, module)
    if i.op in SIMPLE:
        return apply(i, module, SIMPLE[i.op])
    if i.op in BUILT:
        return BUILT[i.op](i, module)

    def missing(warp: Any, mask: Array) -> None:
        raise NotImplementedError(i.text)

    return missing


def _apply_to_halves(i: Instruction, module: Module) -> Handler:
    """Of registers that each hold two numbers of 16 bits."""
    kind, function = TYPES[i.type.removesuffix("x2")], SIMPLE[i.op]

    def compute(*operands: Array) -> Array:
        return function(*(one.view(kind) for one in operands)).view(np.uint32)

    return apply(i, module, compute, *["b32"] * (len(i.args) - 1))


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return a / b
    quotient = np.abs(a) // np.maximum(np.abs(b), 1)
    return (quotient * np.sign(a) * np.sign(b) if a.dtype.kind == "i" else quotient).astype(a.dtype)


SIMPLE: dict[str, Callable[..., Array]] = {
    "add": operator.add,
    "sub": operator.sub,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": operator.invert,
    "neg": operator.neg,
    "abs": np.abs,
    "min": np.fmin,
    "max": np.fmax,
    "div": _divide,
    "rem": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)).astype(a.dtype),
    "sqrt": np.sqrt,
    "rcp": lambda a: (1 / a).astype(a.dtype),
    "ex2": lambda a: np.exp2(a.astype(np.float64)).astype(a.dtype),
    "lg2": lambda a: np.log2(a.astype(np.float64)).astype(a.dtype),
    "cvta": lambda a: a,
    "copysign": lambda a, b: np.copysign(b, a),
    "popc": lambda a: np.array([int(x).bit_count() for x in a], np.uint32),
    "clz": lambda a: np.array([8 * a.itemsize - int(x).bit_length() for x in a], np.uint32),
    "brev": lambda a: np.array([int(f"{int(x):032b}"[::-1], 2) for x in a], np.uint32),
}


def _mul(i: Instruction, module: Module) -> Handler:
    if "wide" in i.mods:
        wide = TYPES[i.type[0] + str(16 * TYPES[i.type].itemsize)]
        return apply(i, module, lambda a, b: a.astype(wide) * b.astype(wide))
    if "hi" in i.mods:
        shift = 8 * TYPES[i.type].itemsize
        return apply(
            i, module, lambda a, b: np.array([int(x) * int(y) >> shift for x, y in zip(a, b, strict=True)], a.dtype)
        )
    return apply(i, module, operator.mul)


def _mad(i: Instruction, module: Module) -> Handler:
    if "wide" not in i.mods:
        return apply(i, module, lambda a, b, c: a * b + c)
    sum_type = i.type[0] + str(16 * TYPES[i.type].itemsize)
    wide = TYPES[sum_type]
    return apply(i, module, lambda a, b, c: a.astype(wide) * b.astype(wide) + c, i.type, i.type, sum_type)


def _fma(i: Instruction, module: Module) -> Handler:
    exact = np.longdouble if i.type == "f64" else np.float64  # of two float32 the product is exact

    def fma(a: Array, b: Array, c: Array) -> Array:
        value = a.astype(exact) * b + c
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


def _shf(i: Instruction, module: Module) -> Handler:
    def shift(low: Array, high: Array, by: Array) -> Array:
        both = high.astype(np.uint64) << np.uint64(32) | low
        by = (by & 31 if "wrap" in i.mods else np.minimum(by, 32)).astype(np.uint64)
        return ((both << by) >> np.uint64(32) if "l" in i.mods else both >> by).astype(np.uint32)

    return apply(i, module, shift, "u32", "u32", "u32")


def _bfe(i: Instruction, module: Module) -> Handler:
    def extract(a: Array, first: Array, count: Array) -> Array:
        bits = [int(x) >> (int(p) & 255) & ((1 << (int(n) & 255)) - 1) for x, p, n in zip(a, first, count, strict=True)]
        if a.dtype.kind == "i":
            bits = [x - (1 << n) if n and x >> (n - 1) & 1 else x for x, n in zip(bits, map(int, count), strict=True)]
        return np.array(bits, a.dtype)

    return apply(i, module, extract, i.type, "u32", "u32")


def _lop3(i: Instruction, module: Module) -> Handler:
    table = int(i.args[4], 0)

    def look_up(a: Array, b: Array, c: Array, _: Array) -> Array:
        out = np.zeros_like(a)
        for k in (k for k in range(8) if table >> k & 1):
            out |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
        return out

    return apply(i, module, look_up, "b32", "b32", "b32", "b32")


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
    "lo": operator.lt,
    "ls": operator.le,
    "hi": operator.gt,
    "hs": operator.ge,
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    # True of NaN as well.
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": operator.ne,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
}


def _setp(i: Instruction, module: Module) -> Handler:
    compare = COMPARE[i.mods[0]]
    a, b = read(i.args[1], i.type, module), read(i.args[2], i.type, module)
    targets = [write(name, module) for name in i.args[0].split("|")]
    combine = SIMPLE[i.mods[1]] if len(i.args) > 3 else None
    third = read(i.args[3].lstrip("!"), "pred", module) if combine else None

    def run(warp: Any, mask: Array) -> None:
        found = compare(a(warp), b(warp))
        if combine and third:
            found = combine(found, ~third(warp) if i.args[3].startswith("!") else third(warp))
        for target, value in zip(targets, (found, ~found), strict=False):
            target(warp, mask, value)

    return run


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


def _testp(i: Instruction, module: Module) -> Handler:
    tests: dict[str, Callable[..., Array]] = {
        "infinite": np.isinf,
        "finite": np.isfinite,
        "notanumber": np.isnan,
        "number": lambda a: ~np.isnan(a),
    }
    return apply(i, module, tests[i.mods[0]])


BUILT: dict[str, Callable[[Instruction, Module], Handler]] = {
    "mul": _mul,
    "mad": _mad,
    "fma": _fma,
    "shl": _shift,
    "shr": _shift,
    "shf": _shf,
    "bfe": _bfe,
    "lop3": _lop3,
    "prmt": _prmt,
    "setp": _setp,
    "selp": _selp,
    "cvt": _cvt,
    "testp": _testp,
}
