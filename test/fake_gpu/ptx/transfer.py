"""PTX's instructions that touch memory, other lanes or the program counter."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from fake_gpu.ptx.module import TYPES, Instruction, Module
from fake_gpu.ptx.operands import LANES, Array, Handler, apply, read, unsigned, write


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


def _find(warp: Any, addresses: Array, size: int, shared: bool) -> tuple[Array, Array]:
    """(buffer, offsets [lanes, size]) of an access of several lanes. Raises IndexError for one that is not allowed."""
    if (addresses % size).any():
        raise IndexError(f"a misaligned access of {size} bytes: {addresses}")
    first, last = int(addresses.min()), int(addresses.max()) + size
    if not shared:
        buffer, start = warp.program.launch.memory.find(first, last - first)
        return buffer, (addresses - first + start)[:, None] + np.arange(size)
    buffer = warp.program.shared
    if not 0 <= first <= last <= buffer.nbytes:
        raise IndexError(f"bytes {first} to {last} of shared memory")
    return buffer, addresses[:, None] + np.arange(size)


def _load(warp: Any, addresses: Array, size: int, i: Instruction) -> Array:
    """[lanes, size] bytes"""
    buffer, at = _find(warp, addresses, size, _is_shared(i))
    warp.program.launch.note(warp, buffer, at.reshape(-1), None, i.text)
    return buffer[at]


def _store(warp: Any, addresses: Array, raw: Array, i: Instruction) -> None:
    """Write [lanes, size] bytes; of lanes that write to one place the last stays."""
    buffer, at = _find(warp, addresses, raw.shape[1], _is_shared(i))
    at, raw = at.reshape(-1), raw.reshape(-1)
    warp.program.launch.note(warp, buffer, at, buffer[at] != raw, i.text)
    buffer[at] = raw


def _ld(i: Instruction, module: Module) -> Handler:
    kind = TYPES[i.type] if i.type[0] == "s" else unsigned(TYPES[i.type])
    targets = [write(name, module) for name in _names(i.args[0])]
    size = kind.itemsize
    if "param" in i.mods:
        name = i.args[1].strip("[] ")
        return lambda warp, mask: targets[0](
            warp, mask, np.full(LANES, warp.program.launch.arguments[name] & ((1 << 8 * size) - 1), kind)
        )
    where = _address(i.args[1], module)

    def run(warp: Any, mask: Array) -> None:
        addresses, out = where(warp)[mask], np.zeros((LANES, len(targets)), kind)
        if "acquire" in i.mods:
            for address in addresses:
                _order(warp, int(address), acquire=True)
            buffer, at = _find(warp, addresses, size, _is_shared(i))
            out[mask] = buffer[at].view(kind)
        else:
            out[mask] = _load(warp, addresses, size * len(targets), i).view(kind)
        for k, target in enumerate(targets):
            target(warp, mask, out[:, k])

    return run


def _st(i: Instruction, module: Module) -> Handler:
    kind = unsigned(TYPES[i.type])
    reads = [read(name, f"u{8 * kind.itemsize}", module) for name in _names(i.args[1])]
    where = _address(i.args[0], module)

    def run(warp: Any, mask: Array) -> None:
        values = np.stack([one(warp) for one in reads], 1)[mask]
        _store(warp, where(warp)[mask], values.view(np.uint8), i)

    return run


def _order(warp: Any, address: int, acquire: bool = False, release: bool = False) -> None:
    clocks, program = warp.program.launch.clocks, warp.program.index
    if clocks and release:
        clocks.release(program, address)
    if clocks and acquire:
        clocks.acquire(program, address)


def _atom(i: Instruction, module: Module) -> Handler:
    """Add, lane by lane. Raises NotImplementedError for another operation."""
    if "add" not in i.mods:
        raise NotImplementedError(i.text)
    kind = TYPES[i.type]
    where, value, target = _address(i.args[1], module), read(i.args[2], i.type, module), write(i.args[0], module)

    def run(warp: Any, mask: Array) -> None:
        addresses, values, out = where(warp), value(warp), np.zeros(LANES, kind)
        for lane in np.flatnonzero(mask):
            _order(warp, int(addresses[lane]), "acquire" in i.mods, "release" in i.mods)
            buffer, at = _find(warp, addresses[lane : lane + 1], kind.itemsize, _is_shared(i))
            cell = buffer[at[0, 0] : at[0, 0] + kind.itemsize].view(kind)
            out[lane] = cell[0]
            cell += values[lane]
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
    """Moves a value from lane to lane of the whole warp. Raises RuntimeError if a lane that it names is elsewhere."""
    is_up = "up" in i.mods
    whole = ("0" if is_up else "31", "-1")
    if "|" in i.args[0] or not {"up", "bfly"} & set(i.mods) or i.args[3:] != whole:
        raise NotImplementedError(i.text)
    target, value = write(i.args[0], module), read(i.args[1], "b32", module)
    by, members = read(i.args[2], "u32", module), read(i.args[4], "u32", module)
    lane = np.arange(LANES)

    def run(warp: Any, mask: Array) -> None:
        named = int(members(warp)[np.flatnonzero(mask)[0]])
        if named & _bits(warp.alive) & ~_bits(mask):
            raise RuntimeError(f"it names lanes {named:#x}, here are {_bits(mask):#x}")
        amount = by(warp).astype(int)
        source = np.where(lane < amount, lane, lane - amount) if is_up else lane ^ amount
        target(warp, mask, value(warp)[source])

    return run


def _redux(i: Instruction, module: Module) -> Handler:
    action = {"add": np.add, "min": np.minimum, "max": np.maximum}
    (reduce,) = (action[mod].reduce for mod in i.mods if mod in action)
    value, members, target = read(i.args[1], i.type, module), read(i.args[2], "u32", module), write(i.args[0], module)

    def run(warp: Any, mask: Array) -> None:
        groups, values, out = members(warp), value(warp), np.zeros(LANES, TYPES[i.type])
        for group in set(groups[mask].tolist()):
            chosen = mask & (group >> np.arange(LANES) & 1 != 0)
            out[mask & (groups == group)] = reduce(values[chosen])
        target(warp, mask, out)

    return run


def _matrix(i: Instruction, module: Module) -> Handler:
    """ldmatrix, stmatrix: 8 x 8 matrices of 16 bits, of which lane L has row L // 4, columns 2 (L % 4) and the next."""
    loads = i.op == "ldmatrix"
    pieces, place = i.args if loads else reversed(i.args)
    where = _address(place, module)
    if "trans" in i.mods:
        raise NotImplementedError(i.text)

    def run(warp: Any, mask: Array) -> None:
        addresses = where(warp)
        for k, name in enumerate(_names(pieces)):
            rows = addresses[8 * k : 8 * k + 8]
            if loads:
                matrix = np.ascontiguousarray(_load(warp, rows, 16, i))
                write(name, module)(warp, mask, matrix.view(np.uint32).reshape(LANES))
            else:
                matrix = np.ascontiguousarray(read(name, "b32", module)(warp))
                _store(warp, rows, matrix.view(np.uint8).reshape(8, 16), i)

    return run


TRANSFERS: dict[str, Callable[[Instruction, Module], Handler]] = {
    **{"ld": _ld, "st": _st, "atom": _atom, "mov": _mov, "bra": _bra, "ret": _ret, "exit": _ret, "shfl": _shfl},
    **{"redux": _redux, "ldmatrix": _matrix, "stmatrix": _matrix},
}
