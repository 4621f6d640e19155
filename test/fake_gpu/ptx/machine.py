"""Runs a PTX module in numpy: a warp is 32 lanes with a program counter each; the warps of a program run one after
another to their next barrier, in an order of choice; programs take turns.

Where lanes part, those at the smallest address run, so that they meet where their ways do.
"""

from __future__ import annotations

import random
from typing import Literal

import numpy as np

from fake_gpu.ptx.instructions import compile_instruction
from fake_gpu.ptx.memory import Clocks, Races, Touched

LANES = 32
Order = Literal["up", "down", "random"]
TURNS = (3, 17, 100, 1000)  # instructions of a warp in one turn, with random order
LONGEST = 2000  # and at most, where programs wait for each other


class Warp:
    """32 lanes of a program and their registers."""

    def __init__(self, program: Program, index: int) -> None:
        self.program, self.index = program, index
        self.registers: dict[str, np.ndarray] = {}
        self.thread = (index * LANES + np.arange(LANES)).astype(np.uint32)
        self.pc = np.zeros(LANES, np.int64)
        self.alive = self.thread < program.launch.threads
        self.waits = False


class Program:
    """One program of a grid, with its shared memory."""

    def __init__(self, launch: Launch, index: int) -> None:
        self.launch, self.index = launch, index
        self.shared = np.full(launch.shared_bytes, 0xA5, np.uint8)
        self.warps = [Warp(self, i) for i in range(-(-launch.threads // LANES))]
        self.touched: dict[int, Touched] = {}

    @property
    def ends(self) -> bool:
        """Whether all lanes have returned."""
        return not any(warp.alive.any() for warp in self.warps)

    def touch(self, warp: int, buffer: np.ndarray, at: np.ndarray, changed: np.ndarray | None) -> bool:
        """Whether an access of a warp races with another's."""
        if id(buffer) not in self.touched:
            self.touched[id(buffer)] = Touched.none(buffer.nbytes)
        return self.touched[id(buffer)].touch(warp, at, changed)


class Launch:
    """A kernel with its arguments. After `run` its `races` are those seen, where `watch`; `constants` go to memory."""

    def __init__(
        self, module, programs, threads, arguments, memory, shared_bytes, *, seed=0, order="random", watch=True
    ):
        self.module, self.threads, self.memory, self.shared_bytes = module, threads, memory, shared_bytes
        self.arguments = dict(zip(module.params, arguments, strict=True))
        self.constants = {name: memory.add(array.copy()) for name, array in module.constants.items()}
        self.order, self.watch, self.draw = order, watch, random.Random(seed)
        self.races = Races()
        self.steps = 0
        self.programs = [Program(self, i) for i in range(programs)]
        self.clocks = Clocks(programs) if programs > 1 else None
        self.handlers = [compile_instruction(instruction, module) for instruction in module.code]

    def run(self, limit: int = 5_000_000) -> None:
        """To the end. Raises TimeoutError after so many instructions, RuntimeError where warps wait forever."""
        while live := [program for program in self.programs if not program.ends]:
            program = self.draw.choice(live)
            ready = [warp for warp in program.warps if warp.alive.any() and not warp.waits]
            if not ready:
                for warp in program.warps:
                    warp.waits = False
                program.touched.clear()
                continue
            warp = ready[0] if self.order == "up" else ready[-1] if self.order == "down" else self.draw.choice(ready)
            turn = self.draw.choice(TURNS) if self.order == "random" else LONGEST
            for _ in range(turn):
                self._step(warp)
                self.steps += 1
                if warp.waits or not warp.alive.any():
                    break
            if self.steps > limit:
                raise TimeoutError(f"{self.module.name} does not end")

    def _step(self, warp: Warp) -> None:
        pc = warp.pc[warp.alive].min()
        mask = warp.alive & (warp.pc == pc)
        if pc >= len(self.module.code):
            warp.alive &= ~mask
            return
        instruction = self.module.code[pc]
        warp.pc[mask] = pc + 1
        if instruction.guard is not None:
            guard = warp.registers.get(instruction.guard, np.zeros(LANES, bool))
            mask = mask & (~guard if instruction.negated else guard)
        if instruction.op == "bar" and "warp" not in instruction.mods:
            if mask.sum() != warp.alive.sum():
                raise RuntimeError(f"a barrier that not all lanes come to: {instruction.text}")
            warp.waits = True
        elif mask.any():
            try:
                self.handlers[pc](warp, mask)
            except Exception as error:
                raise RuntimeError(f"{instruction.text}: {type(error).__name__}: {error}") from error

    def note(self, warp: Warp, buffer: np.ndarray, at: np.ndarray, changed: np.ndarray | None, text: str) -> None:
        """Look whether an access to the bytes `at` of a buffer is a race."""
        if not self.watch:
            return
        if warp.program.touch(warp.index, buffer, at, changed):
            self.races["warps", text] += 1
        if buffer is warp.program.shared or self.clocks is None:
            return
        if self.clocks.touch(warp.program.index, buffer, at, changed):
            self.races["programs", text] += 1
