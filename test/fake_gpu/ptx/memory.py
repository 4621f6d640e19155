"""Memory that PTX runs on, and who has touched each byte of it: two that nothing orders, one writing, are a race.

Between two barriers nothing orders the warps of a program; between programs only a release and an acquire of the same
address do (vector clocks). Two that write the same value do not race: several warps hold what Triton replicates. Of
programs, a write of what is there already is no write. All as in CUDA's memory model, without its weaker cases.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

FIRST = 1 << 28  # the address of the first buffer
GAP = 4096


class Memory:
    """Buffers at addresses of their own."""

    def __init__(self) -> None:
        self.buffers: list[tuple[int, np.ndarray]] = []

    def add(self, array: np.ndarray) -> int:
        """The address that a contiguous array gets; it is read and written in place."""
        base, flat = FIRST, array.reshape(-1).view(np.uint8)
        if self.buffers:
            last, before = self.buffers[-1]
            base = last + (before.nbytes // GAP + 2) * GAP
        self.buffers.append((base, flat))
        return base

    def find(self, address: int, size: int) -> tuple[np.ndarray, int]:
        """(bytes, offset) of an access. Raises IndexError for one outside all buffers."""
        for base, flat in self.buffers:
            if base <= address and address + size <= base + flat.nbytes:
                return flat, address - base
        raise IndexError(f"illegal access of {size} bytes at {address:#x}")


@dataclass
class Touched:
    """Since a program's last barrier: the warp that last wrote a byte (-1: none), and bits of those that touched it."""

    writer: np.ndarray
    readers: np.ndarray
    writers: np.ndarray

    @classmethod
    def none(cls, size: int) -> Touched:
        """Nobody yet."""
        return cls(np.full(size, -1, np.int16), np.zeros(size, np.uint64), np.zeros(size, np.uint64))

    def touch(self, warp: int, at: np.ndarray, changed: np.ndarray | None) -> bool:
        """Whether a warp's access to the bytes `at` is a race. `changed`: which of them it changes; None: it reads."""
        mine = np.uint64(1 << warp)
        if changed is None:
            clash = (self.writer[at] >= 0) & (self.writer[at] != warp)
            self.readers[at] |= mine
        else:
            clash = (self.readers[at] & ~mine != 0) | (changed & (self.writers[at] & ~mine != 0))
            self.writers[at] |= mine
            self.writer[at] = warp
        return bool(clash.any())


@dataclass
class Clocks:
    """What programs know of each other: clock[p, q] is the last step of q that is ordered before p's."""

    programs: int
    clock: np.ndarray = field(init=False)
    released: dict[int, np.ndarray] = field(default_factory=dict)
    _seen: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = np.eye(self.programs, dtype=np.int64)

    def release(self, program: int, address: int) -> None:
        """What the program did so far is seen by who acquires this address."""
        known = self.released.get(address, np.zeros(self.programs, np.int64))
        self.released[address] = np.maximum(known, self.clock[program])
        self.clock[program, program] += 1

    def acquire(self, program: int, address: int) -> None:
        """What was released there is ordered before what the program does next."""
        if address in self.released:
            self.clock[program] = np.maximum(self.clock[program], self.released[address])

    def touch(self, program: int, buffer: np.ndarray, at: np.ndarray, changed: np.ndarray | None) -> bool:
        """Whether a program's access to these bytes of a buffer is a race."""
        if id(buffer) not in self._seen:
            size = buffer.nbytes
            table = (np.full(size, -1), np.zeros(size, np.int64), np.zeros((self.programs, size), np.int64))
            self._seen[id(buffer)] = table
        writer, written, read = self._seen[id(buffer)]
        last, known = writer[at], self.clock[program]
        unseen = (last >= 0) & (last != program) & (known[last] < written[at])
        if changed is None:
            read[program, at] = known[program]
            return bool(unseen.any())
        later = read[:, at] > known[:, None]
        later[program] = False
        clash = (unseen | later.any(0)) & changed
        wrote = at[changed]
        writer[wrote], written[wrote], read[:, wrote] = program, known[program], 0
        return bool(clash.any())


Races = Counter[tuple[str, str]]
"""(between whom, instruction) -> how often."""
