"""Weight formats of experts, with the MoE runners that support each format.

The facts about runners come from `srt/layers/quantization` in SGLang 0.5.17 to 0.5.23. The module also reads the format
from a model's configuration, and computes the slices of experts that are quantized in blocks.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ..upstream.configuration import find_value

Capability = tuple[int, int]
"""The compute capability (major, minor) of an NVIDIA GPU."""
QUANTIZATIONS = ("quantization_config", "compression_config")
"""Keys of config.json in which SGLang looks for the quantization of a model."""


@dataclass(frozen=True)
class Format:
    """A weight format of experts, with the MoE runners that support it."""

    name: str
    fitting: tuple[str, ...] = ()
    """Runners that can run such experts, the best one first. They may replace a runner without policy support."""
    unserved: tuple[str, ...] = ()
    """Runners that do not support a policy with such experts, or whose kernels have not been reviewed."""
    blackwell: str = "auto"
    """The runner that layers choose on Blackwell GPUs if the server's runner is auto. "auto" means triton or marlin."""
    own_kernel: str | None = None
    """The kernel that runs such experts with every runner. None if the runner decides which kernel runs."""
    by_aiter: bool = False
    """True if layers use AMD's aiter with SGLANG_USE_AITER. They use triton for shapes that aiter cannot compute."""
    triton_beside_aiter: str | None = None
    """The first release in which triton can run such experts while aiter is enabled. None if no release can.

    Before this release SGLang stores the weights in aiter's layout, even if the runner is triton.
    """
    marlin_from: Capability = (8, 0)

    def __str__(self) -> str:
        return self.name


# A format has these runners in `unserved` for one of two reasons: they accept only router logits (modelopt_quant.py,
# compressed_tensors_w4a4_mxint4_moe.py), or their code for this format has not been reviewed.
_TRTLLM = ("flashinfer_trtllm", "flashinfer_trtllm_routed")

BF16 = Format("bf16", ("triton",), by_aiter=True, triton_beside_aiter="0.5.17")
# The source of triton_beside_aiter is runner_is_aiter in fp8.py.
FP8_BLOCK = Format("fp8 by block", ("triton",), by_aiter=True, triton_beside_aiter="0.5.23")
FP8_TENSOR = Format("fp8 by tensor", ("triton",), unserved=_TRTLLM, by_aiter=True)
# The source of blackwell is create_moe_runner in modelopt_quant.py.
NVFP4 = Format("NVFP4", ("marlin",), blackwell="flashinfer_trtllm")
# The source of blackwell is create_moe_runner in compressed_tensors_w4a4_nvfp4_moe.py.
COMPRESSED_NVFP4 = Format("NVFP4 (compressed-tensors)", ("flashinfer_trtllm",), blackwell="flashinfer_cutlass")
# triton is last, because it converts such experts to bf16.
MXFP4 = Format("MXFP4", ("triton_kernel", "marlin", "triton"), by_aiter=True, marlin_from=(9, 0))
# For these experts flashinfer_mxfp4 calls other kernels than for gpt-oss. These kernels have not been reviewed.
MXFP4_IN_FP8 = Format("MXFP4 in an fp8 checkpoint", ("marlin",), unserved=("flashinfer_mxfp4",), by_aiter=True)
MXINT4 = Format("MXINT4", ("triton", "marlin"), unserved=_TRTLLM)
INT4 = Format("int4 (compressed-tensors)", ("triton", "marlin"))
FP8_CHANNEL = Format("fp8 by channel (compressed-tensors)", ("triton",), unserved=_TRTLLM, by_aiter=True)
_COMPRESSED_FP8 = {
    "block": Format("fp8 by block (compressed-tensors)", ("triton",), unserved=_TRTLLM),
    "channel": FP8_CHANNEL,
    "tensor": Format("fp8 by tensor (compressed-tensors)", ("triton",), unserved=_TRTLLM),
}
"""Formats of fp8 weights in compressed-tensors checkpoints. The keys are the names of the quantization strategies."""
_NAMED = {
    "none": BF16,
    "modelopt_fp4": NVFP4,
    "modelopt_mixed": replace(NVFP4, name="mixed NVFP4"),
    "modelopt_fp8": FP8_TENSOR,
    "mxfp4": MXFP4,
    "mxfp8": Format("mxfp8", ("deep_gemm",)),
    "nvfp4_online": Format("nvfp4_online", _TRTLLM),
    "w4afp8": Format("w4afp8", own_kernel="cutlass_w4a8_moe"),
    "humming": Format("humming", own_kernel="humming"),
}
"""Formats by the value of --quantization. `read_format` and `_read_compressed` handle all other values."""


def read_format(model: Any, quantization: str | None) -> Format:
    """Return the weight format of a model's experts.

    `model` is SGLang's `ModelConfig`, and `quantization` is the resolved --quantization. If the format is unknown, its
    name is the name of the quantization.
    """
    name = getattr(model, "quantization", None) or quantization or "none"
    config = find_quantization(model)
    if name == "fp8":
        by_scales = FP8_BLOCK if config.get("weight_block_size") else FP8_TENSOR
        return MXFP4_IN_FP8 if getattr(model, "is_fp4_experts", False) else by_scales
    if name == "compressed-tensors":
        return _read_compressed(config)
    return _NAMED.get(name) or Format(name)


def find_quantization(model: Any) -> Mapping[str, Any]:
    """Return the quantization in a model's configuration, or {} if it has none.

    Kimi-K2.5 has its quantization in the configuration of the text model.
    """
    for name, config in product(QUANTIZATIONS, (model.hf_config, model.hf_text_config)):
        declared: Any = getattr(config, name, None)
        declared = declared.to_dict() if hasattr(declared, "to_dict") else declared
        if declared and isinstance(declared, Mapping):
            return declared
    return {}


def find_group(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first group of a compressed-tensors configuration, or {}. SGLang uses this group for all experts."""
    return next(iter((config.get("config_groups") or {}).values()), {})


def _read_compressed(config: Mapping[str, Any]) -> Format:
    """Return the weight format of the experts in a compressed-tensors checkpoint."""
    layers = find_group(config)
    weights, activations = layers.get("weights") or {}, layers.get("input_activations")
    bits, kind, group = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if "mxfp4" in str(config.get("format")) or (bits, kind, group) == (4, "float", 32):
        return MXFP4
    if (bits, kind) == (4, "float"):
        return COMPRESSED_NVFP4 if activations else Format("NVFP4 weights")
    if (bits, kind) == (8, "float"):
        strategy = str(weights.get("strategy"))
        return _COMPRESSED_FP8.get(strategy) or Format(f"fp8 by {strategy} (compressed-tensors)")
    if (bits, kind) == (4, "int") and not activations:
        is_mx = group == 32 and weights.get("symmetric", True) and not weights.get("dynamic")
        return MXINT4 if is_mx else INT4
    return Format("compressed-tensors")


BLOCKS = ("weight_block_size", "block_structure", "group_size")
"""Keys of a quantization whose value is the number of weights that share a scale. -1 means a whole column."""
WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size", "intermediate_size")
"""Keys of config.json that may contain an expert's number of columns. `intermediate_size` may be for dense layers."""
CHECKED = (FP8_BLOCK, _COMPRESSED_FP8["block"], Format("blockwise_int8"))
"""Formats with which SGLang cannot build experts if the columns of a rank end within a block.

`create_weights` in fp8.py, compressed_tensors_w8a8_fp8_moe.py and blockwise_int8.py then raises ValueError.
"""


def find_widths(text_config: Any) -> list[int]:
    """Return the different numbers of columns that experts have. Return [] if the configuration has no such number."""
    found = find_value(text_config, WIDTHS)
    return [width for width in dict.fromkeys(found if isinstance(found, list) else [found]) if width]


def count_block(quantization: Any) -> int:
    """Return the least common multiple of all block lengths of a quantization. Return 1 if it has no blocks."""
    return math.lcm(*_list_blocks(quantization))


def slice_columns(width: int, ranks: int, block: int, pads: bool = False) -> tuple[int, int] | None:
    """Return how many columns of an expert a rank has, as the smallest and the largest number over all ranks.

    Return None if SGLang cannot divide the expert. An expert has `width` columns. If `pads` is True, SGLang rounds each
    slice up to whole blocks, so the last slice may be narrower.
    """
    most = -(-width // (ranks * block)) * block
    least = width - (ranks - 1) * most
    return (least, most) if width % ranks == 0 and (least == most or (pads and least > 0)) else None


def _list_blocks(config: Any) -> Iterator[int]:
    """Yield the lengths of all blocks and groups in a quantization's configuration. MXFP4 has blocks of 32 weights."""
    if isinstance(config, list):
        for part in config:
            yield from _list_blocks(part)
    elif isinstance(config, dict):
        if config.get("quant_method") == "mxfp4":
            yield 32
        for name, value in config.items():
            if name in BLOCKS:
                lengths = value if isinstance(value, list) else [value]
                yield from (length for length in lengths if type(length) is int and length > 0)
            else:
                yield from _list_blocks(value)
