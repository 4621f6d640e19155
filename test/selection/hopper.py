"""The Triton kernel compiled for Hopper on machines without one, and what it came out as."""

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_xshare import Batch, Router, RunnerSlots, build_plan
from sglang_xshare.selection.triton_kernel.kernel import MEASURE, ROUTE, select_kernel
from sglang_xshare.selection.triton_kernel.recipe import OPTIONS, make_recipe
from sglang_xshare.selection.triton_kernel.tile import make_tile

HOPPER = GPUTarget("cuda", 90, 32)
DTYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
SIGNATURE = {
    "valid": "*i1",
    "exact": "*i1",
    "resident": "*i1",
    "depth": "*i32",
    "bias": "*fp32",
    "expert_scale": "*fp32",
    "ranks": "*i64",
    "budgets": "*i64",
    "partials": "*i64",
    "confidences": "*i64",
    "arrivals": "*i32",
    "topk_ids": "*i32",
    "topk_weights": "*fp32",
    "alignment": "*i32",
    "selected_out": "*i1",
    "active": "*i1",
    "vanilla_active": "*i1",
    "kept_mass": "*fp32",
    "rescued": "*i64",
    "num_rows": "i32",
    "row_stride": "i32",
    "num_resident": "i32",
}
FILLED = RunnerSlots()


@dataclass(frozen=True)
class Case:
    """What a launch is of: a plan's keys, a router, and a batch of rows x experts."""

    plan: dict[str, Any]
    shape: tuple[int, int]
    router: Router = field(default_factory=lambda: Router(8))
    tokens_per_request: int = 1
    exact: bool = False
    resident: bool = False
    slots: int | None = None


def compile_kernel(
    case: Case,
    dtype: torch.dtype = torch.float32,
    begins: Any = MEASURE,
    ends: Any = ROUTE,
    slots: RunnerSlots | None = FILLED,
) -> Any:
    """The kernel compiled for Hopper, as it would be launched for a case."""
    exact = torch.zeros(case.shape[0], dtype=torch.bool) if case.exact else None
    resident = torch.zeros(case.shape[1], dtype=torch.bool) if case.resident else None
    plan, batch = build_plan(case.plan), Batch(None, case.tokens_per_request, exact, resident, case.slots)
    recipe = make_recipe(plan, case.router, batch, torch.empty(case.shape, dtype=dtype), slots)
    tile = make_tile(plan, case.router, batch, *case.shape, recipe.shared)
    constants = {"recipe": recipe, "tile": tile, "begins": begins.value, "ends": ends.value}
    if slots is None or not slots.masked:
        constants["masked"] = None
    if slots is None or not slots.aligned or tile.several:
        constants["alignment"] = None
    if not case.exact:
        constants["exact"] = None
    if not case.resident:
        constants["resident"] = None
    if not (recipe.weighs or recipe.warms_some):
        constants["depth"] = None
    if case.slots is None:
        constants["num_resident"] = None
    if case.router.correction_bias is None:
        constants["bias"] = None
    if case.router.expert_scale is None:
        constants["expert_scale"] = None
    if plan.target_per_rank is None:
        constants["ranks"] = None
    if not recipe.follows_voters:
        constants["confidences"] = None
    if not tile.several:
        constants |= {"partials": None, "arrivals": None}
    signature = {"logits": DTYPES[dtype], "masked": DTYPES[dtype]} | SIGNATURE | dict.fromkeys(constants, "constexpr")
    names = select_kernel.arg_names
    signature = {name: signature[name] for name in names}
    source = ASTSource(select_kernel, signature, {(names.index(k),): v for k, v in constants.items()})
    return triton.compile(source, target=HOPPER, options={"num_warps": tile.warps, **OPTIONS})


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
