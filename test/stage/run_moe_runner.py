"""Run in a process of its own, on one patched release, under Triton's interpreter: layers that select, and upstream's
fused Triton MoE runner on what they chose, with what they hand over beside it. Prints one JSON line a batch.
"""

import json
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, fused_moe_triton_config
from sglang.srt.layers.moe.topk import TopKConfig, select_experts
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from sglang_xshare import Batch, SelectionPlan, build_plan, hooks, selection
from sglang_xshare.stage import handover
from sglang_xshare.stage.layer import Layer
from sglang_xshare.stage.step import Step
from stage.contracts import run_experts
from stage.fake import put_in_step

EXPERTS, TOP_K, HIDDEN, WIDTH = 32, 4, 32, 16
PLAN = {"policy": "xshare", "k0": 1, "add": 4}
TRUNCATE = {"policy": "moe-spec", "budget": 3, "coverage": "truncate"}
BATCHES = ((6, PLAN, 0), (6, PLAN, 2), (3, PLAN, 0), (6, TRUNCATE, 1), (40, PLAN, 9), (3, PLAN, 3))
"""Rows, plan, and rows of padding."""


def align(ids: torch.Tensor, block_size: int, num_experts: int) -> tuple[torch.Tensor, ...]:
    """`moe_align_block_size` without a GPU: slots by expert in whole blocks, each block's expert, the count."""
    flat = ids.flatten().tolist()
    slots, experts = [], []
    for expert in sorted(set(flat)):
        mine = [slot for slot, one in enumerate(flat) if one == expert]
        blocks = -(-len(mine) // block_size)
        slots += mine + [len(flat)] * (blocks * block_size - len(mine))
        experts += [expert] * blocks
    return tuple(torch.tensor(x, dtype=torch.int32) for x in (slots, experts, [len(slots)]))


def make_layer(plan: SelectionPlan, rows: int, valid: torch.Tensor | None) -> Layer:
    """Return a layer under policy in a decode step."""
    layer = Layer(0, TopKConfig(top_k=TOP_K, renormalize=True), None)
    put_in_step(layer, plan, Step("decode", rows, Batch(valid)))
    hooks._stage = SimpleNamespace(current_frame=layer.current_frame)  # type: ignore[assignment]
    return layer


def route_and_run(layer: Layer, hidden: torch.Tensor, logits: torch.Tensor) -> dict[str, Any]:
    """Run the layer as the model does: how far the output is off, its largest value, and what the runner was given."""
    handover.taken.clear()
    sizes.clear()
    weights, ids, _ = select_experts(hidden, logits, layer.selecting_config)
    found = fused_moe.fused_experts_impl(hidden.clone(), W1, W2, weights, ids, inplace=True)
    error = (found - run_experts(hidden, ids, weights, W1, W2)).abs().max()
    given = {"taken": dict(handover.taken), "pairs": sizes, "block": block_size(hidden)}
    return {"error": error.item(), "size": found.abs().max().item(), **given}


def block_size(hidden: torch.Tensor) -> int:
    """Return the pairs in a block of the runner's own configuration for these rows."""
    shapes = W1.shape, W2.shape, TOP_K
    return fused_moe_triton_config.try_get_optimal_moe_config(*shapes, "float32", len(hidden))["BLOCK_SIZE_M"]


def measure(invoke: Any) -> Any:
    """Wrap the launch of a product to note the pairs that its programs cover."""

    def launch(*args: Any, **keys: Any) -> Any:
        sizes.append(len(args[9]))
        return invoke(*args, **keys)

    return launch


def main() -> None:
    """Batches of several sizes, with padding rows and rows that lose all experts but one."""
    for prebuilt in (False, True):
        handover.is_prebuilt = prebuilt
        for rows, plan, padding in BATCHES:
            hidden, logits = torch.randn(rows, HIDDEN), torch.randn(rows, EXPERTS)
            layer = make_layer(build_plan(plan), rows, torch.arange(rows) < rows - padding)
            case = {"rows": rows, "plan": plan["policy"], "padding": padding, "prebuilt": prebuilt}
            print(json.dumps({**case, **route_and_run(layer, hidden, logits)}), flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes: list[int] = []
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))
    fused_moe_triton_config.get_device_name = lambda: "no GPU"
    selection._choose_backend = lambda *args: "triton"
    fused_moe.moe_align_block_size = align
    fused_moe.invoke_fused_moe_kernel = measure(fused_moe.invoke_fused_moe_kernel)
    W1, W2 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / 5, torch.randn(EXPERTS, HIDDEN, WIDTH) / 5
    main()
