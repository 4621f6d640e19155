"""Triton's interpreter with the programs of a launch side by side, a thread each, so that a grid barrier can end.

On its own the interpreter runs one program after another. Here they take turns at every operation on memory, which is
one step. Memory is eager: all see a store at once; or lazy: every program has a copy of it, its stores reach the others
when it releases or ends, and theirs reach it when it acquires. Atomics are on memory itself. A GPU does something in
between, word by word. What happens between the threads of one program, neither shows.

Its functions run where TRITON_INTERPRET=1 was set before triton was imported.
"""

import inspect
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from sglang_xshare import Batch, Router, RunnerSlots, Selection, SelectionPlan, select
from sglang_xshare.selection.triton_kernel import kernel, launch, tile
from sglang_xshare.selection.triton_kernel.barrier import wait_for_all

ORDERS = {
    "release": {interpreter._ir.MEM_SEMANTIC.RELEASE, interpreter._ir.MEM_SEMANTIC.ACQUIRE_RELEASE},
    "acquire": {interpreter._ir.MEM_SEMANTIC.ACQUIRE, interpreter._ir.MEM_SEMANTIC.ACQUIRE_RELEASE},
}
Call = tuple[torch.Tensor, SelectionPlan, Router, Batch]
"""What `select()` takes."""

_here = threading.local()


@dataclass(frozen=True)
class Conditions:
    """What a launch runs under."""

    lazy: bool = False
    late: tuple[int, str, int] | None = None
    """(program, "load", "store", "atomic" or "end", n): before its n-th from 0 it waits until no other gets further."""
    without: str | None = None
    """What is left out: the "barrier"; what "release" or "acquire" mean to lazy memory; that the "last" program is the
    one that comes last.
    """
    seconds: float = 30
    """After which the launch counts as hung."""


class Stopped(BaseException):
    """Ends the other programs of a launch that has failed or hangs. No Exception: the interpreter would wrap it."""


@dataclass
class Program:
    """One program of a launch: where it is, and memory as it sees it."""

    index: int
    launch: "Launch"
    done: bool = False
    operations: Counter = field(default_factory=Counter)
    unreleased: list[tuple] = field(default_factory=list)

    def __post_init__(self):
        self.copies = [memory.clone() for memory in self.launch.memory]

    def step(self, kind: str):
        """Comes before every operation on memory, and before the end."""
        self.launch.check()
        if (self.index, kind, self.operations[kind]) == self.launch.conditions.late:
            self.launch.wait_for_others(self)
        self.operations[kind] += 1
        time.sleep(1e-4 if kind == "atomic" else 0)  # to the others: this may be one of many turns of a loop

    def find(self, pointers: interpreter.TensorHandle) -> interpreter.TensorHandle:
        """The pointers as they are for this program: into its copies, where memory is lazy."""
        if not self.launch.conditions.lazy:
            return pointers
        found = pointers.data.copy()
        for memory, copy in zip(self.launch.memory, self.copies, strict=True):
            offset = pointers.data - np.uint64(memory.data_ptr())  # wraps around below the start
            found = np.where(offset < memory.nbytes, np.uint64(copy.data_ptr()) + offset, found)
        return interpreter.TensorHandle(found, pointers.dtype)

    def release(self):
        for pointers, value, mask in self.unreleased:
            interpreter._interpreter.store(pointers.data, value.data, mask.data)
        self.unreleased.clear()

    def acquire(self):
        for memory, copy in zip(self.launch.memory, self.copies, strict=True):
            copy.copy_(memory)
        for pointers, value, mask in self.unreleased:
            interpreter._interpreter.store(self.find(pointers).data, value.data, mask.data)


class Launch:
    """The programs of one launch, on the memory of these tensors."""

    def __init__(self, programs: int, tensors: list[torch.Tensor], conditions: Conditions):
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self.memory = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]
        self.conditions = conditions
        self.deadline = time.monotonic() + conditions.seconds
        self.errors: list[Exception] = []
        self.programs = [Program(index, self) for index in range(programs)]

    def run(self, body):
        """Run the body in every program. Raises what one of them raised, TimeoutError where they hang."""
        threads = [threading.Thread(target=self._run, args=(body, each), daemon=True) for each in self.programs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        waiting = [each.index for each in self.programs if not each.done]
        if waiting:
            raise TimeoutError(f"programs {waiting} of {len(threads)} still wait after {self.conditions.seconds} s")
        if self.conditions.late is not None:
            index, kind, n = self.conditions.late
            if self.programs[index].operations[kind] <= n:
                raise LookupError(f"late = {self.conditions.late}: allowed is an operation that the program comes to")

    def check(self):
        if self.errors or time.monotonic() > self.deadline:
            raise Stopped

    def wait_for_others(self, late: Program):
        """Until each of them has ended or goes round in a loop of atomics."""
        before = [each.operations["atomic"] for each in self.programs]
        while any(
            not each.done and each is not late and each.operations["atomic"] < before[each.index] + 3
            for each in self.programs
        ):
            self.check()
            time.sleep(1e-3)

    def _run(self, body, program: Program):
        _here.program = program
        try:
            body()
            program.step("end")
            program.release()
            program.done = True
        except Stopped:
            pass
        except Exception as error:
            self.errors.append(error)


class Builder(interpreter.InterpreterBuilder):
    """The interpreter's operations, by the program of the thread they are called in."""

    grid_idx = property(lambda self: (_here.program.index, 0, 0))

    def create_masked_load(self, pointers, *args):
        _here.program.step("load")
        return super().create_masked_load(_here.program.find(pointers), *args)

    def create_masked_store(self, pointers, value, mask, *args):
        _here.program.step("store")
        if _here.program.launch.conditions.lazy:
            _here.program.unreleased.append((pointers, value, mask))
        return super().create_masked_store(_here.program.find(pointers), value, mask, *args)

    def create_atomic_rmw(self, *args):
        program, order = _here.program, args[-2]
        program.step("atomic")
        without = program.launch.conditions.without
        if order in ORDERS["release"] and without != "release":
            program.release()
        before = super().create_atomic_rmw(*args)
        if order in ORDERS["acquire"] and without != "acquire":
            program.acquire()
        return before


@contextmanager
def programs_side_by_side(conditions: Conditions):
    """Every launch of the interpreter's, under these conditions. Yields the list of their numbers of programs."""
    sizes: list[int] = []
    patch_lang, rewrite, lock = interpreter._patch_lang, interpreter.InterpretedFunction.rewrite, threading.RLock()
    patched: dict[int, object] = {}

    def patch_once(function):
        # Triton patches its language, for the whole process, at every call of a device function: once will do. Nor may
        # two threads meet in it.
        with lock:
            key = id(function.__globals__)
            patched[key] = patched.get(key) or patch_lang(function)
            return patched[key]

    def rewrite_in_turn(function):
        # Python 3.11's parser fails at random where several threads are in it.
        with lock:
            return rewrite(function)

    class Executor(interpreter.GridExecutor):
        def __call__(self, *args, **kwargs):
            kwargs = {name: value for name, value in kwargs.items() if name in self.arg_names}
            arguments = inspect.signature(self.fn).bind(*args, **kwargs).arguments
            tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
            patched.clear()
            scope = patch_once(self.fn)
            try:
                values = {
                    name: value if name in self.constexprs else interpreter._implicit_cvt(value)
                    for name, value in arguments.items()
                }
                (programs,) = self.grid
                sizes.append(programs)
                interpreter.interpreter_builder.set_grid_dim(programs, 1, 1)
                Launch(programs, tensors, conditions).run(lambda: self.fn(**values))
            finally:
                scope.restore()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "GridExecutor", Executor)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.InterpretedFunction, "rewrite", rewrite_in_turn)
        patch.setattr(interpreter.interpreter_builder, "__class__", Builder)
        if conditions.without == "barrier":
            patch.setattr(kernel, "wait_for_all", lambda *args: None)
            patch.setitem(globals(), "wait_for_all", lambda *args: None)
        yield sizes


@dataclass(frozen=True)
class Found:
    """What a selection came out as, its launches' numbers of programs, and the counters, the barrier's first."""

    selection: Selection
    launches: list[int]
    counters: list[int]


def select_on_one_counter(
    calls: list[tuple[Call, Conditions]], start: int = 0, slots: RunnerSlots | None = None
) -> list[Found]:
    """`select(*call, backend="triton", slots=slots)` for one (call, conditions) after the other, two rows a program.

    All meet at the same counter, which starts at `start`. What is allocated holds NaN and the largest integers.
    """
    counters = torch.tensor([start] + [0] * (launch.CACHE_LINE - 1), dtype=torch.int32)
    found = []
    torch.use_deterministic_algorithms(True)  # of which the filling of what is allocated is one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_find_counter", lambda device, programs: counters)
        patch.setattr(tile, "SHAPES", [tile.Shape(512, one={}, several=(2, 1))])
        for call, conditions in calls:
            with programs_side_by_side(conditions) as launches:
                selection = select(*call, backend="triton", slots=slots)
            found.append(Found(selection, launches, counters.tolist()))
    return found


@triton.jit
def cross_barriers(clock, arrived, passed, arrivals, rounds: tl.constexpr, programs: tl.constexpr):
    """Take the clock's time before and after each of some barriers: two tables [rounds, programs]."""
    program = tl.program_id(0)
    for turn in range(rounds):
        place = turn * programs + program
        tl.store(arrived + place, tl.atomic_add(clock, 1, sem="relaxed"))
        wait_for_all(arrivals, programs)
        tl.store(passed + place, tl.atomic_add(clock, 1, sem="relaxed"))


@dataclass(frozen=True)
class Crossing:
    """Times [rounds, programs] int32, -1 where a program never came, and the counter in the end."""

    arrived: torch.Tensor
    passed: torch.Tensor
    counter: int
    hung: bool


def cross(programs: int, rounds: int, start: int, conditions: Conditions, absent: int = 0) -> Crossing:
    """So many barriers of so many programs, of which some are `absent`; the counter starts at `start`."""
    clock = torch.zeros(1, dtype=torch.int32)
    counter = torch.tensor([start], dtype=torch.int32)
    arrived, passed = torch.full((2, rounds, programs), -1, dtype=torch.int32)
    hung = False
    with programs_side_by_side(conditions):
        try:
            cross_barriers[(programs - absent,)](clock, arrived, passed, counter, rounds, programs)
        except TimeoutError:
            hung = True
    return Crossing(arrived, passed, int(counter.item()), hung)
