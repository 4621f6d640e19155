"""Triton's launches, executed from the PTX that was compiled for sm_90: the arguments are real tensors' memory."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime import driver

from fake_gpu.ptx.machine import Launch, Order
from fake_gpu.ptx.memory import Memory
from fake_gpu.ptx.module import parse

SPARE = 256  # bytes of shared memory beyond those that the kernel asks for
LARGEST = 232448  # bytes of shared memory of a program on Hopper


class TensorMemory(Memory):
    """The memory of a launch's tensors, at their own addresses; any other access is an error."""

    def add_tensor(self, tensor: Any) -> int:
        """The address of a tensor, whose storage may be accessed from now on."""
        storage = tensor.untyped_storage()
        base, size = storage.data_ptr(), storage.nbytes()
        if size and all(base != known for known, _ in self.buffers):
            flat = np.frombuffer((ctypes.c_uint8 * size).from_address(base), np.uint8)
            self.buffers.insert(0, (base, flat))
        return tensor.data_ptr()


@dataclass
class Execution:
    """How launches run, and those that did. `edit` changes the PTX of every kernel before it runs."""

    order: Order = "random"
    seed: int = 0
    watch: bool = True
    edit: Callable[[str], str] | None = None
    launches: list[Launch] = field(default_factory=list)


class Launcher:
    """What Triton calls to launch a compiled kernel."""

    def __init__(self, kernel: Any, execution: Execution) -> None:
        self.kernel, self.execution = kernel, execution
        self.kinds = list(kernel.src.signature.values())

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, packed: Any, *rest: Any) -> None:
        """Run to the end. Raises ValueError for a grid of more than one dimension, and what `Launch.run` raises."""
        if (y, z) != (1, 1):
            raise ValueError(f"{self.kernel.name} on a grid of {x} x {y} x {z}: one dimension is executed")
        self.execute(x, rest[3:])

    def execute(self, programs: int, values: Sequence[Any]) -> None:
        """Run with the values of all parameters, those that the kernel was compiled for among them."""
        memory, execution, ptx = TensorMemory(), self.execution, self.kernel.asm["ptx"]
        module = parse(execution.edit(ptx) if execution.edit else ptx)
        arguments = [
            _encode(value, kind, memory)
            for value, kind in zip(values, self.kinds, strict=True)
            if kind != "constexpr" and value is not None
        ]
        arguments += [0] * (len(module.params) - len(arguments))  # Triton's own scratch memory
        threads = 32 * self.kernel.metadata.num_warps
        shared = self.kernel.metadata.shared + SPARE
        how = {"seed": execution.seed, "order": execution.order, "watch": execution.watch}
        launch = Launch(module, programs, threads, arguments, memory, shared, **how)
        execution.launches.append(launch)
        launch.run()


def _encode(value: Any, kind: str, memory: TensorMemory) -> int:
    if hasattr(value, "data_ptr"):
        return memory.add_tensor(value)
    if isinstance(value, float):
        return int(np.array(value, "f4" if kind == "fp32" else "f8").view("u4" if kind == "fp32" else "u8"))
    return int(value)


class Hopper:
    """A Triton driver for a Hopper that is not there, whose tensors are the CPU's."""

    def get_current_target(self) -> GPUTarget:
        """sm_90"""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The only one."""
        return 0


@contextmanager
def execute_ptx(execution: Execution) -> Iterator[Execution]:
    """Within it Triton compiles for sm_90 and executes what it compiled. Kernels of before it are not affected."""
    init = compiler.CompiledKernel._init_handles
    former = driver._active

    def init_handles(self: Any) -> None:
        self._run = Launcher(self, execution)

    compiler.CompiledKernel._init_handles = init_handles
    driver.set_active(Hopper())
    try:
        yield execution
    finally:
        compiler.CompiledKernel._init_handles = init
        driver._active = former
