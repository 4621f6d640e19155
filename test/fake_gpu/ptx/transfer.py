"""PTX's instructions that touch memory, other lanes or the program counter."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from fake_gpu.ptx.instructions import LANES, SIMPLE, Array, Handler, apply, read, unsigned, write
from fake_gpu.ptx.module import TYPES, Instruction, Module


def _names(arg: str) -> list[str]:
    return [name.strip() for name in arg.strip("{}").split(",")]


def _address(arg: str, module: Module) -> Callable[[Any], Array]:
    found = re.fullmatch(r"\[\s*([^\s+\]]+)\s*(?:\+\s*(-?\w+))?\s*\]", arg)
    if found is None:
        raise ValueError(f"an address that is not understood: {arg}")
    base, offset = read(found[1], "u64", module), int(found[2] or "0", 0)
    return lambda warp: base(warp).astype(np.int64) + offset


def _is_shared(i: Instruction) -> bool:
    return any(mod.startswith("shared") for mod in i.mods)


def _find(warp: Any, address: int, size: int, shared: bool) -> tuple[Array, int]:
    if address % size:
        raise IndexError(f"a misaligned access of {size} bytes at {address:#x}")
    if not shared:
        return warp.program.launch.memory.find(address, size)
    if not 0 <= address <= warp.program.shared.nbytes - size:
        raise IndexError(f"{size} bytes at {address:#x} of shared memory")
    return warp.program.shared, address


def _load(warp: Any, address: int, size: int, shared: bool, text: str) -> Array:
    buffer, at = _find(warp, address, size, shared)
    warp.program.launch.note(warp, buffer, np.arange(at, at + size), None, text)
    return buffer[at : at + size]


def _store(warp: Any, address: int, raw: Array, shared: bool, text: str) -> None:
    buffer, at = _find(warp, address, len(raw), shared)
    target = buffer[at : at + len(raw)]
    changed = target != raw
    warp.program.launch.note(warp, buffer, np.arange(at, at + len(raw)), changed, text)
    target[:] = raw


def _ld(i: Instruction, module: Module) -> Handler:
    kind = TYPES[i.type] if i.type[0] == "s" else unsigned(TYPES[i.type])
    targets = [write(name, module) for name in _names(i.args[0])]
    size = kind.itemsize
    if "param" in i.mods:
        name = i.args[1].strip("[] ")
        return lambda warp, mask: targets[0](
            warp, mask, np.full(LANES, warp.program.launch.arguments[name] & ((1 << 8 * size) - 1), kind)
        )
    where, shared = _address(i.args[1], module), _is_shared(i)

    def run(warp: Any, mask: Array) -> None:
        addresses, out = where(warp), np.zeros((LANES, len(targets)), kind)
        for lane in np.flatnonzero(mask):
            address = int(addresses[lane])
            if "acquire" in i.mods:
                _order(warp, address, acquire=True)
                buffer, at = _find(warp, address, size, shared)
                out[lane] = buffer[at : at + size].view(kind)
            else:
                out[lane] = _load(warp, address, size * len(targets), shared, i.text).view(kind)
        for k, target in enumerate(targets):
            target(warp, mask, out[:, k])

    return run


def _st(i: Instruction, module: Module) -> Handler:
    kind = unsigned(TYPES[i.type])
    reads = [read(name, f"u{8 * kind.itemsize}", module) for name in _names(i.args[1])]
    where, shared = _address(i.args[0], module), _is_shared(i)

    def run(warp: Any, mask: Array) -> None:
        addresses, values = where(warp), np.stack([one(warp) for one in reads], 1)
        for lane in np.flatnonzero(mask):
            _store(warp, int(addresses[lane]), values[lane].view(np.uint8), shared, i.text)

    return run


def _order(warp: Any, address: int, acquire: bool = False, release: bool = False) -> None:
    clocks, program = warp.program.launch.clocks, warp.program.index
    if clocks and release:
        clocks.release(program, address)
    if clocks and acquire:
        clocks.acquire(program, address)


ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    **{name: SIMPLE[name] for name in ("add", "and", "or", "xor", "min", "max")},
    "exch": lambda old, new: new,
}


def _atom(i: Instruction, module: Module) -> Handler:
    action = next(ATOMIC[mod] for mod in i.mods if mod in ATOMIC)
    kind = TYPES[i.type]
    where, value, target = _address(i.args[1], module), read(i.args[2], i.type, module), write(i.args[0], module)
    both = "acq_rel" in i.mods
    acquire, release = both or "acquire" in i.mods, both or "release" in i.mods

    def run(warp: Any, mask: Array) -> None:
        addresses, values, out = where(warp), value(warp), np.zeros(LANES, kind)
        for lane in np.flatnonzero(mask):
            _order(warp, int(addresses[lane]), acquire, release)
            buffer, at = _find(warp, int(addresses[lane]), kind.itemsize, _is_shared(i))
            cell = buffer[at : at + kind.itemsize].view(kind)
            out[lane] = cell[0]
            cell[:] = action(cell, values[lane : lane + 1])
        target(warp, mask, out)

    return run


def _mov(i: Instruction, module: Module) -> Handler:
    if i.args[0].startswith("{"):
        targets = [write(name, module) for name in _names(i.args[0])]
        source = read(i.args[1], i.type, module)
        part = np.dtype(f"u{TYPES[i.type].itemsize // len(targets)}")

        def unpack(warp: Any, mask: Array) -> None:
            parts = np.ascontiguousarray(source(warp)).view(part).reshape(LANES, -1)
            for k, target in enumerate(targets):
                target(warp, mask, parts[:, k])

        return unpack
    if i.args[1].startswith("{"):
        size = TYPES[i.type].itemsize // len(_names(i.args[1]))
        reads = [read(name, f"u{8 * size}", module) for name in _names(i.args[1])]
        target = write(i.args[0], module)
        kind = unsigned(TYPES[i.type])
        return lambda warp, mask: target(
            warp, mask, np.stack([one(warp) for one in reads], 1).view(kind).reshape(LANES)
        )
    return apply(i, module, lambda a: a)


def _bra(i: Instruction, module: Module) -> Handler:
    label = module.labels[i.args[0]]

    def run(warp: Any, mask: Array) -> None:
        warp.pc[mask] = label

    return run


def _ret(i: Instruction, module: Module) -> Handler:
    def run(warp: Any, mask: Array) -> None:
        warp.alive &= ~mask

    return run


def _bits(mask: Array) -> int:
    return sum(1 << int(lane) for lane in np.flatnonzero(mask))


def _shfl(i: Instruction, module: Module) -> Handler:
    """Moves a value from lane to lane. Raises RuntimeError where a lane that it names is elsewhere."""
    (mode,) = {"bfly", "idx", "up", "down"} & set(i.mods)
    names = i.args[0].split("|")
    target, valid = write(names[0], module), write(names[1] if len(names) > 1 else "_", module)
    value = read(i.args[1], "b32", module)
    by, clamp, members = (read(arg, "u32", module) for arg in i.args[2:])
    lane = np.arange(LANES)

    def run(warp: Any, mask: Array) -> None:
        named = int(members(warp)[np.flatnonzero(mask)[0]])
        if named & _bits(warp.alive) & ~_bits(mask):
            raise RuntimeError(f"it names lanes {named:#x}, here are {_bits(mask):#x}")
        amount, bound = by(warp).astype(int), clamp(warp).astype(int)
        segment = bound >> 8 & 31
        least, most = lane & segment, lane & segment | bound & 31 & ~segment
        source = {"bfly": lane ^ amount, "idx": least | amount & ~segment, "up": lane - amount, "down": lane + amount}
        inside = source[mode] >= most if mode == "up" else source[mode] <= most
        target(warp, mask, value(warp)[np.where(inside, source[mode], lane) & 31])
        valid(warp, mask, inside)

    return run


def _redux(i: Instruction, module: Module) -> Handler:
    action = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}
    (reduce,) = (action[mod].reduce for mod in i.mods if mod in action)
    value, members, target = read(i.args[1], i.type, module), read(i.args[2], "u32", module), write(i.args[0], module)

    def run(warp: Any, mask: Array) -> None:
        groups, values, out = members(warp), value(warp), np.zeros(LANES, TYPES[i.type])
        for group in set(groups[mask].tolist()):
            chosen = mask & (group >> np.arange(LANES) & 1 != 0)
            out[mask & (groups == group)] = reduce(values[chosen])
        target(warp, mask, out)

    return run


def _vote(i: Instruction, module: Module) -> Handler:
    value, target = read(i.args[1], "pred", module), write(i.args[0], module)

    def run(warp: Any, mask: Array) -> None:
        yes = value(warp) & mask
        if "ballot" in i.mods:
            target(warp, mask, np.full(LANES, _bits(yes), np.uint32))
        else:
            target(warp, mask, np.full(LANES, yes.any() if "any" in i.mods else (yes | ~mask).all()))

    return run


def _activemask(i: Instruction, module: Module) -> Handler:
    target = write(i.args[0], module)
    return lambda warp, mask: target(warp, mask, np.full(LANES, _bits(mask), np.uint32))


def _elect(i: Instruction, module: Module) -> Handler:
    target = write(i.args[0].split("|")[1], module)
    return lambda warp, mask: target(warp, mask, np.arange(LANES) == np.flatnonzero(mask)[0])


def _matrix(i: Instruction, module: Module) -> Handler:
    """ldmatrix, stmatrix: 8 x 8 matrices of 16 bits, of which lane L has row L // 4, columns 2 (L % 4) and the next."""
    loads = i.op == "ldmatrix"
    pieces, place = i.args if loads else reversed(i.args)
    where = _address(place, module)
    turned = "trans" in i.mods

    def run(warp: Any, mask: Array) -> None:
        addresses = where(warp)
        for k, name in enumerate(_names(pieces)):
            rows = [int(address) for address in addresses[8 * k : 8 * k + 8]]
            if loads:
                matrix = np.stack([_load(warp, row, 16, True, i.text).view(np.uint16) for row in rows])
                matrix = np.ascontiguousarray(matrix.T if turned else matrix)
                write(name, module)(warp, mask, matrix.view(np.uint32).reshape(LANES))
            else:
                matrix = read(name, "b32", module)(warp).view(np.uint16).reshape(8, 8)
                for row, values in zip(rows, np.ascontiguousarray(matrix.T if turned else matrix), strict=True):
                    _store(warp, row, values.view(np.uint8), True, i.text)

    return run


TRANSFERS: dict[str, Callable[[Instruction, Module], Handler]] = {
    "ld": _ld,
    "st": _st,
    "atom": _atom,
    "mov": _mov,
    "bra": _bra,
    "ret": _ret,
    "exit": _ret,
    "shfl": _shfl,
    "redux": _redux,
    "vote": _vote,
    "activemask": _activemask,
    "elect": _elect,
    "ldmatrix": _matrix,
    "stmatrix": _matrix,
}
