"""Launches of the Triton kernel compiled for Hopper on machines without one, and the size of what comes out."""

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton

from selection.cases import spell
from selection.variants import compiling
from sglang_xshare import Batch, Router, RunnerSlots, select


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


@dataclass(frozen=True)
class Size:
    """Of one compiled kernel: instructions, registers a thread, and bytes of stack a thread, which hold what spills."""

    instructions: int
    registers: int
    stack: int


def measure(compiled: Any) -> Size:
    """What the assembler made of a kernel, by its own disassembler, without the padding behind the last branch."""
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
    return Size(len(instructions), int(usage["REG"]), int(usage["STACK"]))
