"""A checkpoint that can be pruned: which tensors are experts' and which routers', in safetensors files."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ..admission.model import MoeModel, read_folder
from ..stage.upstream.configuration import NUM_EXPERTS

INDEX = "model.safetensors.index.json"
EXPERT = re.compile(
    r"(?P<block>.*\blayers\.(?P<layer>\d+)\.(?:mlp|block_sparse_moe)\.)experts\.(?P<expert>\d+)\.(?P<rest>.+)"
)
"""As Qwen, DeepSeek and those that follow them, and Mixtral, name an expert's tensors."""
ROUTER = ("gate.weight", "gate.bias", "gate.e_score_correction_bias", "e_score_correction_bias")
"""Tensors of a block with a row for each expert."""
SIGMOID = ("Glm4MoeForCausalLM",)
"""Architectures that score by it though their configuration does not say so."""


@dataclass(frozen=True)
class Source:
    """`shards`: the tensors' names by file. `blocks`: what the names of an MoE layer's tensors begin with, by layer."""

    folder: Path
    model: MoeModel
    shards: dict[str, list[str]]
    blocks: dict[int, str]


def read_source(folder: Path) -> Source:
    """Read config.json and the files' headers. Raises ValueError, one line, for a checkpoint that could not be pruned,
    or not so that it answers as `moe-spec` with a static ranking.
    """
    model = read_folder(str(folder))
    shards = _read_shards(folder)
    _check_router(folder, model, [name for names in shards.values() for name in names])
    return Source(folder, model, shards, _find_blocks(folder, shards, model.num_experts))


def _read_shards(folder: Path) -> dict[str, list[str]]:
    from safetensors import SafetensorError, safe_open

    index = folder / INDEX
    files = sorted(file.name for file in folder.glob("*.safetensors"))
    if index.is_file():
        try:
            files = sorted({Path(name).name for name in orjson.loads(index.read_bytes())["weight_map"].values()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"--model {folder}: {INDEX}: {error}; allowed is a safetensors index") from None
    if not files:
        raise ValueError(f"--model {folder}: no *.safetensors; allowed is a checkpoint in that format")
    shards = {}
    for name in files:
        try:
            with safe_open(folder / name, framework="pt") as file:
                shards[name] = list(file.keys())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"--model {folder}: {name}: {error}; allowed is a complete checkpoint") from None
    return shards


def _find_blocks(folder: Path, shards: dict[str, list[str]], num_experts: int) -> dict[int, str]:
    """The MoE layers. Raises ValueError for names or numbers of experts that are not known."""
    experts: defaultdict[str, set[int]] = defaultdict(set)
    layers: dict[str, int] = {}
    names = [name for shard in shards.values() for name in shard]
    for name in names:
        if found := EXPERT.fullmatch(name):
            experts[found["block"]].add(int(found["expert"]))
            layers[found["block"]] = int(found["layer"])
    if not experts:
        known = "allowed are experts named as ...layers.0.mlp.experts.0... or block_sparse_moe.experts.0..."
        raise ValueError(f"--model {folder}: no tensor of a single expert, as where all are packed in one; {known}")
    if len(set(layers.values())) < len(layers):
        raise ValueError(f"--model {folder}: several blocks of experts in one layer: {', '.join(sorted(layers))}")
    for block, numbers in experts.items():
        if numbers != set(range(num_experts)):
            raise ValueError(
                f"--model {folder}: {block}: {len(numbers)} experts; allowed are {num_experts}, as configured"
            )
        if f"{block}gate.weight" not in names:
            raise ValueError(f"--model {folder}: no {block}gate.weight; allowed is a router of that name")
    for name in names:
        within = next((block for block in experts if name.startswith(block)), None)
        rest = name.removeprefix(within or "")
        if within and not EXPERT.fullmatch(name) and rest not in ROUTER and not rest.startswith("shared"):
            raise ValueError(f"--model {folder}: {name}: not known whether it has a row for each expert")
    return {layer: block for block, layer in sorted(layers.items(), key=lambda found: found[1])}


def _check_router(folder: Path, model: MoeModel, names: list[str]) -> None:
    """Refuse a router that would weigh or choose the experts that are left by other numbers than among all."""
    config = orjson.loads((folder / "config.json").read_bytes())
    is_sigmoid = model.scoring == "sigmoid" or model.architecture in SIGMOID
    if not is_sigmoid and not model.renormalize:
        reason = "a softmax over fewer experts gives each more weight; allowed is a model that renormalizes its weights"
        raise ValueError(f"--model {folder}: norm_topk_prob = false: {reason}")
    if not is_sigmoid and any(name.endswith("e_score_correction_bias") for name in names):
        reason = "a softmax over fewer experts raises scores beside the bias; allowed are sigmoid scores with a bias"
        raise ValueError(f"--model {folder}: a correction bias: {reason}")
    groups, best = (_find(config, name) for name in ("n_group", "topk_group"))
    if (groups or 1) > 1 and best != groups:
        reason = f"topk_group = {best} of n_group = {groups}: a group's rank depends on its lost experts"
        raise ValueError(f"--model {folder}: {reason}; allowed is a router without groups")
    if not any(part.get(name) == model.num_experts for part in list_parts(config) for name in NUM_EXPERTS):
        raise ValueError(f"--model {folder}: config.json: the number of experts by layer; allowed is one for all")
    if re.search(r"\bexperts\.\d", orjson.dumps(config).decode()):
        raise ValueError(f"--model {folder}: config.json names single experts, as of a quantization; allowed is none")


def _find(config: dict[str, Any], name: str) -> Any:
    """A key of the configuration or of a part of it."""
    return next((part[name] for part in list_parts(config) if name in part), None)


def list_parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A configuration, and below it that of the language model of several modes."""
    return [config, *(inner for part in config.values() if isinstance(part, dict) for inner in list_parts(part))]
