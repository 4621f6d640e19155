"""Random weights of a Qwen3-MoE on disk, because SGLang refuses dummy weights with paged experts."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmark.gpu.moe_layer import COMMON

EXPERT, ATTENTION = 0.02, 0.002
"""Standard deviations. An expert moves a hidden state of unit variance by about 0.2: enough for a wrong expert to show
in the logits, and little enough that rows of all layers agree as embeddings do. See `dummy_server`.
"""


def write_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Write `config`'s bfloat16 weights, a file a layer."""
    draw = torch.Generator().manual_seed(0)
    files: dict[str, str] = {}
    for number, tensors in enumerate(_list_files(config, draw)):
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}) + "\n")


def _list_files(config: Mapping[str, Any], draw: torch.Generator) -> Iterator[dict[str, torch.Tensor]]:
    hidden, width, head = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    queries, cached = head * config["num_attention_heads"], head * config["num_key_value_heads"]

    def normal(rows: int, columns: int, deviation: float) -> torch.Tensor:
        drawn = torch.empty(rows, columns, dtype=torch.bfloat16)
        return drawn.normal_(0, deviation, generator=draw)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    words = normal(config["vocab_size"], hidden, math.sqrt(1 - COMMON)) + normal(1, hidden, math.sqrt(COMMON))
    head_weight = normal(config["vocab_size"], hidden, hidden**-0.5)
    yield {"model.embed_tokens.weight": words, "lm_head.weight": head_weight, "model.norm.weight": ones(hidden)}
    for layer in range(config["num_hidden_layers"]):
        tensors = {"mlp.gate.weight": normal(config["num_experts"], hidden, hidden**-0.5)}
        attention = {"q": (queries, hidden), "k": (cached, hidden), "v": (cached, hidden), "o": (hidden, queries)}
        for name, (out, into) in attention.items():
            tensors[f"self_attn.{name}_proj.weight"] = normal(out, into, ATTENTION)
        for expert in range(config["num_experts"]):
            for name, out, into in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
                tensors[f"mlp.experts.{expert}.{name}_proj.weight"] = normal(out, into, EXPERT)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.weight"] = ones(hidden)
        for name in ("q", "k"):
            tensors[f"self_attn.{name}_norm.weight"] = ones(head)
        yield {f"model.layers.{layer}.{name}": tensor for name, tensor in tensors.items()}
