"""Whether servers of some models fit on the GPU together: an estimate, made before minutes go into starting them."""

import subprocess
from collections.abc import Sequence
from typing import Any

from benchmark.gpu.models import CONFIGS

GIB = 1 << 30
BF16 = 2
MXFP4 = 4.25 / 8  # with a scale of 8 bits for every 32 values
# Beside the weights: CUDA's context, captured graphs, activations, the cache of 16,384 tokens (gpt-oss-120b: 1.1 GiB).
OVERHEAD = 4 * GIB


def check_memory(names: Sequence[str]) -> None:
    """Raise RuntimeError where the free memory of the GPU is less than a server of each of these models needs."""
    needed, free = sum(map(estimate_bytes, names)) / GIB, read_free_bytes() / GIB
    if needed > free:
        servers = "1 server" if len(names) == 1 else f"{len(names)} servers"
        models = ", ".join(sorted(set(names)))
        raise RuntimeError(f"{models}: {servers} need about {needed:.0f} GiB of GPU memory; free are {free:.0f}")


def estimate_bytes(name: str) -> int:
    """What a server of this model takes of the GPU."""
    return round(count_weight_bytes(CONFIGS[name])) + OVERHEAD


def count_weight_bytes(config: dict[str, Any]) -> float:
    """Of embeddings, attention and MLPs; norms and biases are nothing beside them."""
    hidden, width = config["hidden_size"], config.get("moe_intermediate_size", config["intermediate_size"])
    experts = config.get("num_experts", config.get("num_local_experts", 1))
    heads = 2 * (config["num_attention_heads"] + config["num_key_value_heads"])
    mlp = 3 * experts * hidden * width * (MXFP4 if "quantization_config" in config else BF16)
    attention = heads * config["head_dim"] * hidden * BF16
    return config["num_hidden_layers"] * (mlp + attention) + 2 * config["vocab_size"] * hidden * BF16


def read_free_bytes() -> int:
    """Of the first GPU. Raises RuntimeError where the driver does not say."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True).stdout.split()[0]) << 20
    except (OSError, ValueError, IndexError):
        raise RuntimeError("nvidia-smi does not say how much memory of the GPU is free") from None
