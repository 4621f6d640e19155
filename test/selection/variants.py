"""Launches of the Triton kernel counted and compiled for Hopper, on a machine without a GPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import driver

from selection.hopper import HOPPER
from sglang_xshare.selection.triton_kernel import launch


@dataclass
class Compiled:
    """The kernels that launches have needed, by what Triton finds them by again, and what compiling them took: CPU
    seconds, of the assembler's process too, whatever else the machine does.
    """

    kernels: dict[Any, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


@contextmanager
def compiling() -> Iterator[Compiled]:
    """`select(..., backend="triton")` compiles what it would launch, and launches nothing. Yields what was compiled.

    Every cooperative launch gets its counters. Triton's own cache on disk, where it is warm, saves the compilation.
    """
    compiled = Compiled()
    kernel = launch.select_kernel
    target = SimpleNamespace(
        get_current_target=lambda: HOPPER, get_current_device=lambda: 0, get_current_stream=lambda device: 0
    )

    def warm_up(grid: tuple[int], *args: Any, **keys: Any) -> None:
        began = sum(os.times()[:4])
        before = len(compiled.kernels)
        kernel.run(*args, grid=grid, warmup=True, **keys)
        compiled.kernels = kernel.device_caches[0][0]
        if len(compiled.kernels) > before:
            compiled.seconds.append(sum(os.times()[:4]) - began)

    class Warmed:
        def __getitem__(self, grid):
            return lambda *args, **keys: warm_up(grid, *args, **keys)

    kernel.device_caches.clear()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver, "_active", target)
            patch.setattr(launch, "select_kernel", Warmed())
            patch.setattr(launch, "INTERPRETED", True)
            patch.setattr(launch, "_find_counter", lambda device, programs: torch.zeros(32, dtype=torch.int32))
            yield compiled
    finally:
        kernel.device_caches.clear()
