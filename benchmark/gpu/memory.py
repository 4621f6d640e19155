"""Whether servers of some models fit on the GPU together: an estimate, made before minutes go into starting them."""

import subprocess
from collections.abc import Sequence
from typing import Any

from benchmark.gpu.models import read_config

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


def check_memory(names: Sequence[str], draft: str | None = None) -> None:
    """Raise RuntimeError where the free memory of the GPU is less than a server of each of these models needs, each
    with that draft.
    """
    needed, free = sum(estimate_bytes(name, draft) for name in names) / GIB, read_free_bytes() / GIB
    if needed > free:
        servers = "1 server" if len(names) == 1 else f"{len(names)} servers"
        models = ", ".join(sorted(set(names)))
        raise RuntimeError(f"{models}: {servers} need about {needed:.0f} GiB of GPU memory; free are {free:.0f}")


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
