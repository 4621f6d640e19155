"""The inputs and the outputs of MoE runners, for each convention of empty slots."""

from types import SimpleNamespace

import torch

from sglang_xshare.stage.layer import DROPPED, FILLED, Convention


def check(ids: torch.Tensor, weights: torch.Tensor, places: int, convention: Convention) -> list[str]:
    """The rules that slots [n, columns] break, for a runner that holds an expert in each of so many places."""
    lowest = 0 if convention == FILLED else -1
    chosen = [[place for place in row if place >= 0] for row in ids.tolist()]
    rules = {
        "ids are int32": ids.dtype == torch.int32,
        "weights are float32": weights.dtype == torch.float32,
        "ids are in range": bool(((ids >= lowest) & (ids < places)).all()),
        "weights are finite": bool(weights.isfinite().all()),
        "a slot without an expert weighs nothing": not weights[ids < 0].any(),
        "a row's experts are distinct": convention != DROPPED or all(len(set(row)) == len(row) for row in chosen),
    }
    return [rule for rule, kept in rules.items() if not kept]


def run_experts(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Compute the output of a runner in loops. The weights are those of the expert in each place."""
    out = torch.zeros_like(hidden)
    for row, (experts, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for place, share in zip(experts, shares, strict=True):
            if place >= 0:
                gate, up = (w1[place] @ hidden[row]).chunk(2)
                out[row] += share * (w2[place] @ (torch.nn.functional.silu(gate) * up))
    return out


CONFIG = {"apply_router_weight_on_input": False, "activation": "silu", "gemm1_alpha": None, "gemm1_clamp_limit": None}


def run_native(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """The same by upstream's own loop over the experts."""
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native

    config = SimpleNamespace(**CONFIG, no_combine_keep_router_weight=False)
    layer = SimpleNamespace(num_experts=len(w1), num_local_experts=len(w1), w13_weight=w1, w2_weight=w2)
    return moe_forward_native(layer, hidden, (weights, ids, None), config)
