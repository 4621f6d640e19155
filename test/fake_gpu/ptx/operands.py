"""What an instruction reads and writes: the operands of a warp's 32 lanes, by their PTX types."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from fake_gpu.ptx.module import TYPES, Instruction, Module

np.seterr(all="ignore")
LANES = 32
Array = np.ndarray
Reader = Callable[[Any], Array]
Writer = Callable[[Any, Array, Array], None]
Handler = Callable[[Any, Array], None]
SPECIAL: dict[str, Reader] = {
    "%tid.x": lambda warp: warp.thread,
    "%laneid": lambda warp: np.arange(LANES, dtype=np.uint32),
    "%ctaid.x": lambda warp: np.full(LANES, warp.program.index, np.uint32),
    "%nctaid.x": lambda warp: np.full(LANES, len(warp.program.launch.programs), np.uint32),
    "%ntid.x": lambda warp: np.full(LANES, warp.program.launch.threads, np.uint32),
    **{f"%{name}.{axis}": lambda warp: np.zeros(LANES, np.uint32) for name in ("tid", "ctaid") for axis in "yz"},
    **{f"%{name}.{axis}": lambda warp: np.ones(LANES, np.uint32) for name in ("nctaid", "ntid") for axis in "yz"},
}


def unsigned(dtype: np.dtype) -> np.dtype:
    """The unsigned type as wide."""
    return dtype if dtype.kind == "b" else np.dtype(f"u{dtype.itemsize}")


def read(arg: str, kind: str, module: Module) -> Reader:
    """A function of a warp: the operand in its 32 lanes, as this type."""
    wanted = TYPES[kind]
    bits = unsigned(wanted)
    if arg in SPECIAL:
        special = SPECIAL[arg]
        return lambda warp: special(warp).astype(bits).view(wanted)
    if arg.startswith("%") or arg in module.registers:
        missing = np.zeros(LANES, unsigned(module.type_of(arg)))

        def read_register(warp: Any) -> Array:
            value = warp.registers.get(arg, missing)
            if value.dtype.itemsize != wanted.itemsize:
                value = value.astype(bits)
            return value.view(wanted)

        return read_register
    if arg in module.shared:
        return lambda warp: np.zeros(LANES, bits).view(wanted)
    if arg in module.constants:
        return lambda warp: np.full(LANES, warp.program.launch.constants[arg], bits).view(wanted)
    if literal := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", arg):
        value = np.full(LANES, int(literal[1], 16), f"u{len(literal[1]) // 2}").view(wanted)
    elif wanted.kind == "b":
        value = np.full(LANES, int(arg) != 0)
    else:
        value = np.full(LANES, int(arg.rstrip("U"), 0) & ((1 << 8 * bits.itemsize) - 1), bits).view(wanted)
    return lambda warp: value


def write(arg: str, module: Module) -> Writer:
    """A function that puts values into a register, in some lanes. A narrower value is extended by its own type."""
    if arg == "_":
        return lambda warp, mask, value: None
    bits = unsigned(module.type_of(arg))

    def write_register(warp: Any, mask: Array, value: Array) -> None:
        value = np.ascontiguousarray(value)
        if value.dtype.itemsize == bits.itemsize:
            value = value.view(bits)
        else:  # extended by its sign, where it has one
            value = (value if value.dtype.kind in "iu" else value.view(unsigned(value.dtype))).astype(bits)
        if not mask.all():
            value = np.where(mask, value, warp.registers.get(arg, np.zeros(LANES, bits)))
        warp.registers[arg] = value

    return write_register


def apply(i: Instruction, module: Module, function: Callable[..., Array], *kinds: str) -> Handler:
    """An instruction that computes its first operand from the others, of these types or all of the instruction's."""
    reads = [read(arg, kinds[k] if kinds else i.type, module) for k, arg in enumerate(i.args[1:])]
    target = write(i.args[0], module)
    return lambda warp, mask: target(warp, mask, function(*(one(warp) for one in reads)))
