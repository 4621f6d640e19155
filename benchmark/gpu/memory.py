"""Number of layers of a model that are served: all, or as many as fit in the GPU's free memory.

The number is estimated before minutes go into starting servers. An H100 of 78 GiB and an H200 take one server of each
model with all layers. If several servers have to run at once, fewer layers keep the MoE layer's shape and what a policy
does to it, and dilute its gain by the embeddings and the host's share.
"""

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark.common.record import Record
from benchmark.gpu.models import COMMON, name_cut, read_config
from benchmark.gpu.table import Row
from sglang_xshare.check.weights import read_weights

GIB = 1 << 30
# Beside the weights: CUDA's context, captured graphs, activations, the cache of 16,384 tokens (gpt-oss-120b: 1.1 GiB).
OVERHEAD = 4 * GIB
CONTEXT = 1 * GIB  # what a server holds of these while it loads
DRAFT = 2.5 * GIB  # of gpt-oss-120b: one layer, and two embeddings of its vocabulary
# Of mxfp4 as the Triton kernels want it on Hopper: rows are padded, and SGLang 0.5.17 keeps the scales twice.
PADDED = 1.08
# While a layer's gate and up projections are brought into that layout, so many times their packed bytes are taken
# beside them: triton_kernels' `HopperMXValueLayout.swizzle_data`, its live tensors counted at 2880 x 5760.
SWIZZLE = 10.2
STEP = 4
"""Layers are cut to multiples of it, the least being one: as many for 78 GiB as for 79, and even, as gpt-oss needs."""
LEFT = 0.1
"""Of the free memory, where layers are cut: the estimate is rough. An H100 took two servers that were cut so."""


def fit_model(record: Record, key: str, name: str, servers: int = 1, draft: str | None = None) -> str | None:
    """`choose_model` for this GPU. Another model than `name`, or none, is printed, and kept by `key` for the table."""
    free = read_free_bytes()
    chosen = choose_model(name, servers, free, draft)
    if chosen != name or depth_key(key) in record:
        point = {
            "layers": read_config(chosen)["num_hidden_layers"] if chosen else 0,
            "of": read_config(name)["num_hidden_layers"],
            "servers": servers,
            "needed_gib": round(servers * estimate_bytes(name, draft) / GIB, 1),
            "free_gib": round(free / GIB, 1),
        }
        record.add(depth_key(key), **point)
        print(f"gpu: {key}: {_describe(point)}", flush=True)
    return chosen


def choose_model(name: str, servers: int, free: int, draft: str | None = None) -> str | None:
    """The model of which so many servers with drafts fit in `free` bytes: `name`, or fewer layers; None for none."""
    if fits(name, servers, free, draft):
        return name
    layers = read_config(name)["num_hidden_layers"]
    cut = (name_cut(name, count) for count in range((layers - 1) // STEP * STEP, 0, -STEP))
    return next((one for one in cut if fits(one, servers, round((1 - LEFT) * free), draft)), None)


def fits(name: str, servers: int, free: int, draft: str | None = None) -> bool:
    """Whether so many servers of a model fit in so many bytes."""
    return servers * estimate_bytes(name, draft) <= free


def rows(points: Mapping[str, Any], key: str) -> list[Row]:
    """What was cut or left out; nothing where all layers were served."""
    point = points.get(depth_key(key))
    return [Row(f"{key}, layers", _describe(point))] if point and point["layers"] != point["of"] else []


def depth_key(key: str) -> str:
    """The record's key of how many layers were served."""
    return f"{key}/layers"


def _describe(point: Mapping[str, Any]) -> str:
    said = f"{point['layers']} of {point['of']}" if point["layers"] else f"left out, with {STEP} layers too"
    count = point["servers"]
    servers = f"{count} servers of {point['of']} need" if count > 1 else f"a server of {point['of']} needs"
    needs = f"{servers} about {point['needed_gib']:.0f} GiB of GPU memory"
    return f"{said}: {needs}; free are {point['free_gib']:.0f}"


def estimate_bytes(name: str, draft: str | None = None) -> int:
    """What a server of this model takes of the GPU at most: while it loads, or when it serves, with its draft."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(COMMON | read_config(name)))
        weights = read_weights(Path(folder))
    experts = weights.model.num_experts * weights.expert  # of a layer
    serving = OVERHEAD + (DRAFT if draft else 0)
    if "quantization_config" not in read_config(name):
        return round(weights.held + weights.moe_layers * experts + serving)
    assert weights.bits is not None  # it is None for a checkpoint's own bytes alone
    packed = 2 / 3 * experts * 4 / weights.bits  # of gate and up, without scales
    return round(weights.held + PADDED * weights.moe_layers * experts + max(serving, CONTEXT + SWIZZLE * packed))


def read_free_bytes() -> int:
    """Of the first GPU. Raises RuntimeError where the driver does not say."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True).stdout.split()[0]) << 20
    except (OSError, ValueError, IndexError):
        raise RuntimeError("nvidia-smi does not say how much memory of the GPU is free") from None
