"""What an MoE runner of each convention takes."""

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
