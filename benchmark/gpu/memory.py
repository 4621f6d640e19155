"""How many layers of a model are served side by side: all, or as many as the GPU's free memory takes.

An estimate, made before minutes go into starting servers. An H200 takes every pair as it is. An H100 of 78 GiB takes no
two servers of Qwen3-30B-A3B or gpt-oss-120b: fewer layers keep the MoE layer's shape and what a policy does to it, and
dilute its gain by the embeddings and the host's share.
"""

import subprocess
from collections.abc import Mapping
from typing import Any

from benchmark.common.record import Record
from benchmark.gpu.models import name_cut, read_config
from benchmark.gpu.table import Row

GIB = 1 << 30
BF16 = 2
# Beside the weights: CUDA's context, captured graphs, activations, the cache of 16,384 tokens (gpt-oss-120b: 1.1 GiB).
OVERHEAD = 4 * GIB
CONTEXT = 1 * GIB  # what a server holds of these while it loads
# mxfp4 as the Triton kernels want it on Hopper: packed bytes of a row in multiples of 64, rows of scales in multiples
# of 256. SGLang 0.5.17 keeps the scales as they were, too.
VALUES, SCALES = 64, 256
PER_SCALE = 32  # values
# While a layer's gate and up projections are brought into that layout, so many times their packed bytes are taken
# beside them: triton_kernels' `HopperMXValueLayout.swizzle_data`, its live tensors counted at 2880 x 5760.
SWIZZLE = 10.2
STEP = 4
"""Layers are cut to multiples of it, the least being one: as many for 78 GiB as for 79, and even, as gpt-oss needs."""
LEFT = 0.1
"""Of the free memory, where layers are cut: no GPU has confirmed the estimate."""


def fit_model(record: Record, key: str, name: str, servers: int, draft: str | None = None) -> str | None:
    """`choose_model` for this GPU as it is. Another model than `name`, or none, is printed, and kept in the record for
    the table: `key` is what is served, in few words.
    """
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
    """The model of which so many servers, each with that draft, fit side by side in `free` bytes: `name` itself, else
    the one cut to the most layers; None where none fits.
    """
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
    needs = f"{point['servers']} servers of {point['of']} need about {point['needed_gib']:.0f} GiB of GPU memory"
    return f"{said}: {needs}; free are {point['free_gib']:.0f}"


def estimate_bytes(name: str, draft: str | None = None) -> int:
    """What a server of this model takes of the GPU at most: while it loads, or when it serves, with its draft."""
    config = read_config(name)
    loading = 0.0
    if "quantization_config" in config:
        experts, hidden, width = _shape(config)
        loading = CONTEXT + SWIZZLE * experts * 2 * width * hidden / 2
    serving = OVERHEAD + (count_weight_bytes(read_config(draft)) if draft else 0)
    return round(count_weight_bytes(config) + max(serving, loading))


def count_weight_bytes(config: dict[str, Any]) -> float:
    """Of embeddings, attention and MLPs; norms and biases are nothing beside them."""
    experts, hidden, width = _shape(config)
    heads = 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    if "quantization_config" in config:
        mlp = experts * (_count_mxfp4_bytes(2 * width, hidden) + _count_mxfp4_bytes(hidden, width))
    else:
        mlp = 3 * experts * hidden * width * BF16
    attention = heads * config["head_dim"] * hidden * BF16
    return config["num_hidden_layers"] * (mlp + attention) + 2 * config["vocab_size"] * hidden * BF16


def _count_mxfp4_bytes(rows: int, columns: int) -> int:
    """Of a matrix: its values, and its scales twice."""
    return rows * _round_up(columns // 2, VALUES) + (rows + _round_up(rows, SCALES)) * columns // PER_SCALE


def _shape(config: dict[str, Any]) -> tuple[int, int, int]:
    """(experts, hidden, width) of the MLP; a dense one is one expert."""
    experts = config.get("num_experts", config.get("num_local_experts", 1))
    return experts, config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def read_free_bytes() -> int:
    """Of the first GPU. Raises RuntimeError where the driver does not say."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True).stdout.split()[0]) << 20
    except (OSError, ValueError, IndexError):
        raise RuntimeError("nvidia-smi does not say how much memory of the GPU is free") from None
