"""Launches of the Triton kernel compiled for Hopper on machines without one, and the size of what comes out."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

from selection.cases import spell
from sglang_xshare import Batch, Router, RunnerSlots, select
from sglang_xshare.selection.triton_kernel import launch


@dataclass(frozen=True)
class Case:
    """A launch: of a plan as it is spelled, a router, and a batch of rows x experts, for a runner's slots."""

    plan: str
    shape: tuple[int, int] = (16, 128)
    router: Router = field(default_factory=lambda: Router(8))
    tokens_per_request: int = 1
    exact: bool = False
    slots: int | None = None
    """Slots that experts are paged into; None if experts are not paged."""
    runner: RunnerSlots | None = field(default_factory=RunnerSlots)
    dtype: torch.dtype = torch.bfloat16
    together: bool = True
    """True if programs can wait for each other: otherwise several programs take several launches."""


def compile_kernel(case: Case) -> Any:
    """Compile the kernel for Hopper, as it is launched for a case."""
    exact = torch.zeros(case.shape[0], dtype=torch.bool) if case.exact else None
    resident = None if case.slots is None else torch.zeros(case.shape[1], dtype=torch.bool)
    batch = Batch(None, case.tokens_per_request, exact, resident, case.slots)
    logits, ranks = torch.zeros(case.shape, dtype=case.dtype), torch.arange(case.shape[1]) // 32
    with compiling() as compiled:
        select(logits, spell(case.plan), case.router, batch, ranks, backend="triton", slots=case.runner)
    (kernel,) = compiled.kernels.values()
    return kernel


def measure(compiled: Any) -> tuple[int, int, int]:
    """Instructions, registers of a thread, and bytes of its stack, which hold what spills, by the disassembler.

    The padding behind the last branch does not count.
    """
    with TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])

        def dump(option: str) -> str:
            command = [triton.knobs.nvidia.cuobjdump.path, option, str(cubin)]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", dump("-sass"), re.MULTILINE)
        usage = dict(re.findall(r"(\w+):(\d+)", dump("-res-usage")))
    while instructions[-1].startswith(("NOP", "BRA")):
        instructions.pop()
    return len(instructions), int(usage["REG"]), int(usage["STACK"])


HOPPER = GPUTarget("cuda", 90, 32)


@dataclass
class Compiled:
    """The kernels that launches needed, by name and Triton's key."""

    kernels: dict[tuple[str, Any], Any] = field(default_factory=dict)


@contextmanager
def compiling(gpu: GPUTarget = HOPPER, together: bool = True) -> Iterator[Compiled]:
    """Whatever launches a Triton kernel, `select(..., backend="triton")` or the stage, compiles it for a GPU instead.
    Yields what was compiled.

    With `together` every launch of several programs gets its counter, else none has one. Triton's own cache on disk,
    where it is warm, saves the compilation.
    """
    compiled = Compiled()
    used: dict[str, Any] = {}
    target = SimpleNamespace(
        get_current_target=lambda: gpu, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )

    def warm_up(kernel: Any, grid: tuple[int], *args: Any, **keys: Any) -> None:
        name = kernel.__name__
        if name not in used:
            used[name] = kernel
            kernel.device_caches.clear()
        kernel.run(*args, grid=grid, warmup=True, **keys)
        compiled.kernels |= {(name, key): one for key, one in kernel.device_caches[0][0].items()}

    def find_counter(device: torch.device, programs: int) -> torch.Tensor | None:
        return torch.zeros(32, dtype=torch.int32) if together else None

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver, "_active", target)
            patch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: partial(warm_up, kernel, grid))
            patch.setattr(launch, "INTERPRETED", True)
            patch.setattr(launch, "_find_counter", find_counter)
            yield compiled
    finally:
        for kernel in used.values():
            kernel.device_caches.clear()
