"""Number of layers of a model that are served: all, or as many as fit in the GPU's free memory.

The number is estimated before minutes go into starting servers. An H100 of 78 GiB and an H200 take one server of each
model with all layers. If several servers have to run at once, fewer layers keep the MoE layer's shape and what a policy
does to it, and dilute its gain by the embeddings and the host's share.
"""

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmark.common.record import Record
from benchmark.gpu.models import COMMON, name_cut, read_config
from benchmark.gpu.table import Row
from sglang_xshare.check.weights import read_weights

GIB = 1 << 30
# Beside the weights: CUDA's context, captured graphs, activations, the cache of 16,384 tokens (gpt-oss-120b: 1.1 GiB).
OVERHEAD = 4 * GIB
CONTEXT = 1 * GIB  # the part of it that a loading server holds
DRAFT = 2.5 * GIB  # the draft of gpt-oss-120b: one layer and two embeddings
# The factor for mxfp4 in the layout of the Triton kernels on Hopper: padded rows, and scales twice in SGLang 0.5.17.
PADDED = 1.08
# Scratch memory of the conversion to that layout, in packed bytes of a layer's gate and up projections: live tensors of
# triton_kernels' `HopperMXValueLayout.swizzle_data`, counted at 2880 x 5760.
SWIZZLE = 10.2
STEP = 4
"""Layers are cut to a multiple of this: equal for 78 and 79 GiB, and an even number, which gpt-oss needs."""
LEFT = 0.1
"""Share of the free memory that stays free if layers are cut, because the estimate is rough."""


def fit_model(record: Record, key: str, name: str, servers: int = 1, draft: str | None = None) -> str | None:
    """Return `choose_model` for this GPU. Print another model than `name`, or none, and record it by `key`."""
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
    """Return the model whose `servers` with drafts fit in `free` bytes: `name`, fewer of its layers, or None."""
    if fits(name, servers, free, draft):
        return name
    layers = read_config(name)["num_hidden_layers"]
    cut = (name_cut(name, count) for count in range((layers - 1) // STEP * STEP, 0, -STEP))
    return next((one for one in cut if fits(one, servers, round((1 - LEFT) * free), draft)), None)


def fits(name: str, servers: int, free: int, draft: str | None = None) -> bool:
    """Return whether this number of servers of a model fits in `free` bytes."""
    return servers * estimate_bytes(name, draft) <= free


def rows(points: Mapping[str, Any], key: str) -> Iterator[Row]:
    """Yield a row if layers or the whole model were not served."""
    point = points.get(depth_key(key))
    if point and point["layers"] != point["of"]:
        yield Row(f"{key}, layers", _describe(point))


def depth_key(key: str) -> str:
    """Return the record's key of the number of layers that were served."""
    return f"{key}/layers"


def _describe(point: Mapping[str, Any]) -> str:
    layers = f"{point['layers']} of {point['of']}" if point["layers"] else f"none, because {STEP} do not fit either"
    count = point["servers"]
    servers = f"{count} servers of {point['of']} need" if count > 1 else f"a server of {point['of']} needs"
    needs = f"{servers} about {point['needed_gib']:.0f} GiB of GPU memory"
    return f"{layers}: {needs}; {point['free_gib']:.0f} are free"


def estimate_bytes(name: str, draft: str | None = None) -> int:
    """Return the most bytes that a server of this model takes of the GPU, while it loads or serves, with its draft."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(COMMON | read_config(name)))
        weights = read_weights(Path(folder))
    experts = weights.model.num_experts * weights.expert  # bytes of a layer
    serving = OVERHEAD + (DRAFT if draft else 0)
    if "quantization_config" not in read_config(name):
        return round(weights.held + weights.moe_layers * experts + serving)
    assert weights.bits is not None  # only a checkpoint's own bytes have none
    packed = 2 / 3 * experts * 4 / weights.bits  # bytes of gate and up, without scales
    return round(weights.held + PADDED * weights.moe_layers * experts + max(serving, CONTEXT + SWIZZLE * packed))


def read_free_bytes() -> int:
    """Return the free bytes of the first GPU. Raises RuntimeError if the driver does not report them."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True).stdout.split()[0]) << 20
    except (OSError, ValueError, IndexError):
        raise RuntimeError("nvidia-smi does not report the free memory of the GPU") from None
