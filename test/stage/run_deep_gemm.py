"""Run in a process of its own, on one release, under Triton's interpreter: the kernels that put rows in DeepGEMM's
order and back, between them a plain product an expert. Prints one JSON line a layout and batch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from sglang.kernels.ops.moe import ep_moe_kernels as kernels
from sglang.srt.layers.moe.moe_runner.deep_gemm import _get_compact_all_tokens
from triton.runtime import interpreter

EXPERTS, TOP_K, HIDDEN, BLOCK = 8, 4, 32, 128


class Index(int):
    """What a loop counts by: compiled, a tensor."""

    def to(self, dtype: Any) -> Index:
        return self


def count(*bounds: Any) -> Iterator[Index]:
    """`range`, in the interpreter and in the kernels that it runs."""
    return map(Index, range(*bounds))


def make_slots(rows: int, empty: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights [rows, TOP_K]: every other row has one, the last none; empty slots dropped or filled."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(rows)]).int()
    weights = torch.rand(rows, TOP_K, generator=generator)
    is_empty = torch.zeros(rows, TOP_K, dtype=torch.bool)
    is_empty[::2, 1:] = True
    is_empty[-1] = True
    filler = -1 if empty == "dropped" else ids[:, :1]
    return torch.where(is_empty, filler, ids), weights.masked_fill(is_empty, 0)


def run_masked(hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(each place's product, each slot's place, facts) where every expert has room for as many rows."""
    counts, _, places, rows, _ = kernels.moe_ep_deepgemm_preprocess(
        ids, EXPERTS, hidden, TOP_K, None, output_dtype=torch.bfloat16
    )
    products = torch.full((EXPERTS, rows.shape[1], HIDDEN), torch.nan)
    for expert, count in enumerate(counts.tolist()):
        products[expert, :count] = rows[expert, :count].float() @ WEIGHTS[expert]
    return products.flatten(0, 1), places, {"largest": int(counts.max()), "room": rows.shape[1]}


def run_compact(hidden: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """As `run_masked`, where experts have the room that they need, in whole blocks."""
    room = _get_compact_all_tokens(ids.numel(), EXPERTS, BLOCK)
    valid, _ = kernels.fused_moe_dispatch_index(ids, EXPERTS, 1)
    padded = (valid + BLOCK - 1) // BLOCK * BLOCK
    padded[-1] += room - padded.sum()
    starts, owner = torch.empty_like(valid), torch.empty(room, dtype=torch.int32)
    rows, scales = torch.empty(room, HIDDEN, dtype=torch.bfloat16), torch.empty(room, 1)
    places = torch.empty_like(ids)
    kernels.ep_scatter(hidden, None, ids, padded, valid, starts, rows, scales, owner, places, quant_block_size=HIDDEN)
    products = torch.full((room, HIDDEN), torch.nan)
    for place in (owner >= 0).nonzero().flatten().tolist():
        products[place] = rows[place].float() @ WEIGHTS[owner[place]]
    return products, places, {"largest": int((owner >= 0).sum()), "room": room}


def run(layout: Any, rows: int, empty: str) -> dict[str, Any]:
    ids, weights = make_slots(rows, empty)
    hidden = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    products, places, facts = layout(hidden, ids)
    out = torch.full((rows, HIDDEN), torch.nan)
    kernels.post_reorder_deepgemm(products, out, places, ids, weights, TOP_K, rows, HIDDEN, 1.0)
    expected = torch.zeros(rows, HIDDEN)
    for row, (experts, shares) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            if share:
                expected[row] += share * (hidden[row].float() @ WEIGHTS[expert])
    used = places.view(-1)[ids.view(-1) >= 0]
    return facts | {
        "error": float((out - expected).abs().max()),
        "places": len(used.unique()) == len(used) and bool(((used >= 0) & (used < len(products))).all()),
        "loaded": len(ids[ids >= 0].unique()),
    }


if __name__ == "__main__":
    WEIGHTS = torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(2))
    kernels.range = interpreter.range = count
    kernels._get_launch_config_2d = lambda device, rows, width: ((rows, 1), HIDDEN)  # asks a GPU
    for layout in (run_masked, run_compact):
        for rows in (1, 7, 40):
            print(json.dumps({"layout": layout.__name__, "rows": rows, **run(layout, rows, "dropped")}), flush=True)
    ids = torch.zeros(200, TOP_K, dtype=torch.int32)
    room = (len(ids) // 256 + 1) * 256  # of `moe_ep_deepgemm_preprocess`
    for empty in ("dropped", "filled"):
        ids[:, 1:] = -1 if empty == "dropped" else 0
        counts, places = kernels.fused_moe_dispatch_index(ids, EXPERTS, room)
        facts = {"largest": int(counts.max()), "room": room}
        print(json.dumps({"layout": empty, "rows": len(ids), **facts}), flush=True)
