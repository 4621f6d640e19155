"""Run in a process of its own, on one patched release, under Triton's interpreter: layers that select, and upstream's
fused Triton MoE runner on what they chose. Prints one JSON line a batch.
"""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe, fused_moe_triton_config
from sglang.srt.layers.moe.topk import TopKConfig, select_experts
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from selection.test_slots import align
from sglang_xshare import Batch, SelectionPlan, build_plan, hooks, selection
from sglang_xshare.stage.alignment import Aligner
from sglang_xshare.stage.layer import Layer, Resources
from sglang_xshare.stage.step import Step

EXPERTS, TOP_K, HIDDEN, WIDTH = 32, 4, 32, 16
PLAN = {"policy": "xshare", "k0": 1, "add": 4}
TRUNCATE = {"policy": "moe-spec", "budget": 3, "coverage": "truncate"}


class Sorter:
    """Upstream's `moe_align_block_size`, of which a machine without a GPU has no kernel."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, block_size: int, num_experts: int) -> tuple[torch.Tensor, ...]:
        self.calls += 1
        slots, experts = align(ids, block_size)
        return tuple(torch.tensor(x, dtype=torch.int32) for x in (slots, experts, [len(slots)]))


def make_layer(aligner: Aligner | None, plan: SelectionPlan, rows: int, valid: torch.Tensor | None) -> Layer:
    """A layer under policy in a decode step."""
    layer = Layer(0, TopKConfig(top_k=TOP_K, renormalize=True), None)
    layer.use(Resources(aligner))
    layer.plan, layer.step = plan, Step("decode", rows, Batch(valid))
    return layer


def run_experts(hidden: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The MoE layer's output by plain loops over what was chosen."""
    out = torch.zeros_like(hidden)
    for row, (experts, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            gate, up = (W1[expert] @ hidden[row]).chunk(2)
            out[row] += share * (W2[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


def route_and_run(layer: Layer, hidden: torch.Tensor, logits: torch.Tensor) -> dict[str, Any]:
    """A forward of the layer as the model runs it: how many slots upstream sorted, and how far the output is off."""
    before = sorter.calls
    weights, ids, _ = select_experts(hidden, logits, layer.config)
    found = fused_moe.fused_experts_impl(hidden.clone(), W1, W2, weights, ids, inplace=True)
    error = (found - run_experts(hidden, weights, ids)).abs().max()
    return {"sorted by upstream": sorter.calls - before, "error": error.item(), "size": found.abs().max().item()}


def main(aligner: Aligner) -> None:
    """Batches of the same and of other sizes, with padding rows and rows that lose all experts but one."""
    for rows, plan, padding in (
        (6, PLAN, 0),
        (6, PLAN, 2),
        (3, PLAN, 0),
        (6, TRUNCATE, 1),
        (40, PLAN, 9),
        (3, PLAN, 3),
    ):
        for turn in ("first", "again"):
            hidden, logits = torch.randn(rows, HIDDEN), torch.randn(rows, EXPERTS)
            valid = torch.arange(rows) < rows - padding
            layer = make_layer(aligner, build_plan(plan), rows, valid)
            print(json.dumps({"rows": rows, "turn": turn, **route_and_run(layer, hidden, logits)}), flush=True)
    # Ids that were not routed last, a draft model's for instance, are not mistaken for those that were.
    other = torch.randint(0, EXPERTS, (6, TOP_K), dtype=torch.int32)
    shares = torch.full((6, TOP_K), 0.25)
    before, hidden = sorter.calls, torch.randn(6, HIDDEN)
    found = fused_moe.fused_experts_impl(hidden.clone(), W1, W2, shares, other, inplace=True)
    error = (found - run_experts(hidden, shares, other)).abs().max().item()
    print(json.dumps({"rows": 6, "turn": "other ids", "sorted by upstream": sorter.calls - before, "error": error}))


if __name__ == "__main__":
    torch.manual_seed(0)
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", device="cpu"))
    fused_moe_triton_config.get_device_name = lambda: "no GPU"
    selection._choose_backend = lambda *args: "triton"
    sorter = fused_moe.moe_align_block_size = Sorter()
    W1, W2 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / 5, torch.randn(EXPERTS, HIDDEN, WIDTH) / 5
    aligner = Aligner()
    hooks._stage = SimpleNamespace(  # type: ignore[assignment]
        route=lambda config, logits: config,
        finish=lambda config, ids, weights: ids,
        align=lambda upstream, by_tma: partial(aligner.align, upstream, by_tma),
    )
    main(aligner)
