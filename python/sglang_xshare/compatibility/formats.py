"""The formats of a model's experts, and which one a configuration declares: read in upstream's quantization methods
(`srt/layers/quantization`), releases 0.5.17 to 0.5.23. And how ranks slice experts that are quantized by blocks.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..upstream.configuration import find_value

Capability = tuple[int, int]
"""(major, minor) of an NVIDIA GPU."""


@dataclass(frozen=True)
class Format:
    """One format of experts: its `name`, and of those that we know more of how they run."""

    name: str
    fitting: tuple[str, ...] = ()
    """Runners that run such experts, the best first, for where SGLang's own choice cannot be served."""
    unserved: tuple[str, ...] = ()
    """Runners whose kernel for such experts takes no policy's choice, or was not followed."""
    blackwell: str = "auto"
    """The runner that its layers choose on Blackwell while the server's is auto: "auto" for triton or marlin."""
    own_kernel: str | None = None
    """The one kernel that runs such experts whatever the runner."""
    by_aiter: bool = False
    """Whether, with SGLANG_USE_AITER, layers left alone run these on AMD's aiter, or triton for shapes it lacks."""
    triton_beside_aiter: str | None = None
    """The first release that leaves such weights unshuffled for triton where aiter is on; None where none does."""
    marlin_from: Capability = (8, 0)

    def __str__(self) -> str:
        return self.name


# With some experts it takes router logits alone (modelopt_quant.py, compressed_tensors_w4a4_mxint4_moe.py), or was not
# followed.
_TRTLLM = ("flashinfer_trtllm", "flashinfer_trtllm_routed")

BF16 = Format("bf16", ("triton",), by_aiter=True, triton_beside_aiter="0.5.17")
# fp8.py: runner_is_aiter
FP8_BLOCK = Format("fp8 by block", ("triton",), by_aiter=True, triton_beside_aiter="0.5.23")
FP8_TENSOR = Format("fp8 by tensor", ("triton",), unserved=_TRTLLM, by_aiter=True)
# modelopt_quant.py: create_moe_runner
NVFP4 = Format("NVFP4", ("marlin",), blackwell="flashinfer_trtllm")
MIXED_NVFP4 = Format("mixed NVFP4", ("marlin",), blackwell="flashinfer_trtllm")
# compressed_tensors_w4a4_nvfp4_moe.py: create_moe_runner
COMPRESSED_NVFP4 = Format("NVFP4 (compressed-tensors)", ("flashinfer_trtllm",), blackwell="flashinfer_cutlass")
NVFP4_WEIGHTS = Format("NVFP4 weights")
NVFP4_ONLINE = Format("nvfp4_online", _TRTLLM)
# Last triton, which holds such experts as bf16.
MXFP4 = Format("MXFP4", ("triton_kernel", "marlin", "triton"), by_aiter=True, marlin_from=(9, 0))
# Its kernels behind flashinfer_mxfp4 are others than gpt-oss's, and were not followed.
MXFP4_IN_FP8 = Format("MXFP4 in an fp8 checkpoint", ("marlin",), unserved=("flashinfer_mxfp4",), by_aiter=True)
MXFP8 = Format("mxfp8", ("deep_gemm",))
MXINT4 = Format("MXINT4", ("triton", "marlin"), unserved=_TRTLLM)
INT4 = Format("int4 (compressed-tensors)", ("triton", "marlin"))
COMPRESSED = Format("compressed-tensors")
FP8_CHANNEL = Format("fp8 by channel (compressed-tensors)", ("triton",), unserved=_TRTLLM, by_aiter=True)
_COMPRESSED_FP8 = {
    "block": Format("fp8 by block (compressed-tensors)", ("triton",), unserved=_TRTLLM),
    "channel": FP8_CHANNEL,
    "tensor": Format("fp8 by tensor (compressed-tensors)", ("triton",), unserved=_TRTLLM),
}
"""By the strategy of their scales."""
_NAMED = {
    "none": BF16,
    "modelopt_fp4": NVFP4,
    "modelopt_mixed": MIXED_NVFP4,
    "modelopt_fp8": FP8_TENSOR,
    "mxfp4": MXFP4,
    "mxfp8": MXFP8,
    "nvfp4_online": NVFP4_ONLINE,
    "w4afp8": Format("w4afp8", own_kernel="cutlass_w4a8_moe"),
    "humming": Format("humming", own_kernel="humming"),
}
"""By --quantization's name; what else there is `read_format` and `_read_compressed` tell apart."""


def read_format(model: Any, quantization: str | None) -> Format:
    """The format of a `ModelConfig`'s experts; of an unknown one the name is the resolved --quantization."""
    name = getattr(model, "quantization", None) or quantization or "none"
    config = find_quantization(model)
    if name == "fp8":
        by_scales = FP8_BLOCK if config.get("weight_block_size") else FP8_TENSOR
        return MXFP4_IN_FP8 if getattr(model, "is_fp4_experts", False) else by_scales
    if name == "compressed-tensors":
        return _read_compressed(config)
    return _NAMED.get(name) or Format(name)


def find_quantization(model: Any, names: Sequence[str] = ("quantization_config",)) -> Mapping[str, Any]:
    """The quantization declared under the first of these names, else empty; of Kimi-K2.5 that of its text model."""
    for name, config in product(names, (model.hf_config, model.hf_text_config)):
        declared: Any = getattr(config, name, None)
        declared = declared.to_dict() if hasattr(declared, "to_dict") else declared
        if declared and isinstance(declared, Mapping):
            return declared
    return {}


def find_group(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the first group of layers of a compressed-tensors configuration, which upstream takes for all experts; an
    empty one without groups.
    """
    return next(iter((config.get("config_groups") or {}).values()), {})


def _read_compressed(config: Mapping[str, Any]) -> Format:
    """The format of a compressed-tensors checkpoint."""
    layers = find_group(config)
    weights, activations = layers.get("weights") or {}, layers.get("input_activations")
    bits, kind, group = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if "mxfp4" in str(config.get("format")) or (bits, kind, group) == (4, "float", 32):
        return MXFP4
    if (bits, kind) == (4, "float"):
        return COMPRESSED_NVFP4 if activations else NVFP4_WEIGHTS
    if (bits, kind) == (8, "float"):
        strategy = str(weights.get("strategy"))
        return _COMPRESSED_FP8.get(strategy) or Format(f"fp8 by {strategy} (compressed-tensors)")
    if (bits, kind) == (4, "int") and not activations:
        is_mx = group == 32 and weights.get("symmetric", True) and not weights.get("dynamic")
        return MXINT4 if is_mx else INT4
    return COMPRESSED


QUANTIZATIONS = ("quantization_config", "compression_config")
"""Where SGLang looks for how a checkpoint is quantized."""
BLOCKS = ("weight_block_size", "block_structure", "group_size")
"""Where a quantization's configuration has how many weights share a scale; -1 for a whole column of them."""
WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size", "intermediate_size")
"""Where a model's configuration has the columns of an expert's gate and up projections, the rows of its down
projection. A model with dense layers beside its experts has `intermediate_size` for those.
"""
CHECKED = (FP8_BLOCK, _COMPRESSED_FP8["block"], Format("blockwise_int8"))
"""Formats whose experts SGLang does not build when a rank's columns end within a block: `create_weights` of fp8.py,
compressed_tensors_w8a8_fp8_moe.py and blockwise_int8.py raises ValueError.
"""


def find_widths(text_config: Any) -> list[int]:
    """Return the columns of an expert, each width once; an empty list when the configuration has none."""
    found = find_value(text_config, WIDTHS)
    return [width for width in dict.fromkeys(found if isinstance(found, list) else [found]) if width]


def count_block(quantization: Any) -> int:
    """Return the columns that share scales: the least common multiple of all blocks, 1 without any."""
    return math.lcm(*_list_blocks(quantization))


def slice_columns(width: int, ranks: int, block: int, pads: bool = False) -> tuple[int, int] | None:
    """Return (fewest columns of a rank, most), with `pads` rounded to whole blocks; None when SGLang has no such
    slices.
    """
    most = -(-width // (ranks * block)) * block
    least = width - (ranks - 1) * most
    return (least, most) if width % ranks == 0 and (least == most or (pads and least > 0)) else None


def _list_blocks(config: Any) -> Iterator[int]:
    """Yield the lengths of all blocks and groups that a quantization's configuration names, at whatever depth:
    compressed tensors have them by group of layers. MXFP4 is 32 by definition.
    """
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
