"""How many layers of a model are served side by side: all, or as many as the GPU's free memory takes.

An H200 takes every pair as it is. An H100 of 78 GiB takes no two servers of Qwen3-30B-A3B or gpt-oss-120b: fewer layers
keep the MoE layer's shape and what a policy does to it, and dilute its gain by the embeddings and the host's share.
"""

from collections.abc import Mapping
from typing import Any

from benchmark.common.record import Record
from benchmark.gpu import memory
from benchmark.gpu.memory import GIB, estimate_bytes
from benchmark.gpu.models import name_cut, read_config
from benchmark.gpu.table import Row

STEP = 4
"""Layers are cut to multiples of it, the least being one: as many for 78 GiB as for 79, and even, as gpt-oss needs."""
LEFT = 0.1
"""Of the free memory, where layers are cut: `memory` estimates, and no GPU has confirmed it."""


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


def is_cut(served: str, name: str) -> bool:
    """Whether `served` is the model `name` cut to fewer layers."""
    return any(served == name_cut(name, count) for count in range(1, read_config(name)["num_hidden_layers"]))


def fit_model(record: Record, key: str, name: str, servers: int, draft: str | None = None) -> str | None:
    """`choose_model` for this GPU as it is. Another model than `name`, or none, is printed, and kept in the record for
    the table: `key` is what is served, in few words.
    """
    free = memory.read_free_bytes()
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
