"""Launches of the Triton kernel counted and compiled, on a machine without a GPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

from sglang_xshare.selection.triton_kernel import launch

HOPPER = GPUTarget("cuda", 90, 32)


@dataclass
class Compiled:
    """The kernels that launches needed, by name and Triton's key, and CPU seconds of compiling, the assembler's too."""

    kernels: dict[tuple[str, Any], Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


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
        began = sum(os.times()[:4])
        kernel.run(*args, grid=grid, warmup=True, **keys)
        found = {(name, key): one for key, one in kernel.device_caches[0][0].items()}
        if found.keys() - compiled.kernels.keys():
            compiled.seconds.append(sum(os.times()[:4]) - began)
        compiled.kernels |= found

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
