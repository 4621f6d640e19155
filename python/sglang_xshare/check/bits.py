"""The number of bits of a weight. It follows from the model's quantization if there are no safetensors."""

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..compatibility.formats import find_group

SCALED = {
    **dict.fromkeys(("fp8", "w8a8_fp8", "w8a8_int8", "blockwise_int8", "modelopt_fp8"), 8.0),
    "mxfp8": 8.25,
    "mxfp4": 4.25,
    **dict.fromkeys(("modelopt_fp4", "nvfp4_online"), 4.5),
}
"""The bits of a weight for each quantization, including the weight's share of the scale.

With mxfp8 and mxfp4, 32 weights have a common scale of 8 bits. With NVFP4, 16 weights have such a scale. The scales of
fp8 blocks add less than 0.1 % and are not counted.
"""
GROUPED = ("awq", "awq_marlin", "gptq", "gptq_marlin", "moe_wna16")
SKIPPED = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
"""Keys of a quantization's configuration. Their values are the modules that are not quantized."""


@dataclass(frozen=True)
class Bits:
    """The bits of a weight: in `experts`, in other `linear` layers, and in all other modules (`plain`).

    Modules in `skipped` are not quantized, so their weights also have `plain` bits.
    """

    experts: float
    linear: float
    plain: float
    skipped: tuple[str, ...] = ()

    def count(self, module: str, is_expert: bool, is_linear: bool) -> float:
        """Return the bits of one weight in a module. Raises ValueError if a pattern in `skipped` is wrong."""
        if not (is_expert or is_linear) or any(_matches(pattern, module) for pattern in self.skipped):
            return self.plain
        return self.experts if is_expert else self.linear


def read_bits(name: str, declared: Mapping[str, Any], expert_dtype: str | None, plain: float) -> Bits:
    """Return the bits of a model's weights. Raises ValueError if the quantization is unknown.

    `name` is the name of the quantization, and `declared` is its configuration in the checkpoint. `expert_dtype` is
    from config.json. `plain` is the number of bits of a weight without quantization.
    """
    if name == "none":
        return Bits(plain, plain, plain)
    if name == "compressed-tensors":
        experts = linear = _read_compressed(declared)
    elif name in GROUPED:
        group, width = declared.get("group_size") or 128, declared.get("bits") or 4
        # Each group has a scale of 16 bits and a zero point. With group_size -1 a group is a whole column, so scale and
        # zero point are negligible.
        experts = linear = width + (16 + width) / group if group > 0 else width
    elif name in SCALED:
        experts = linear = SCALED[name]
    else:
        known = ", ".join((*SCALED, *GROUPED, "compressed-tensors"))
        raise ValueError(f"the bytes of quantization {name} are unknown without safetensors; must be one of {known}")
    if name == "mxfp4":  # mxfp4 quantizes only experts
        linear = plain
    # DeepSeek-V4 stores all weights except experts in fp8.
    if declared.get("routed_experts_quant_method") == "mxfp4" or expert_dtype == "fp4":
        experts = SCALED["mxfp4"]
    skipped = (pattern for key in SKIPPED for pattern in declared.get(key) or ())
    return Bits(experts, linear, plain, tuple(skipped))


def _read_compressed(declared: Mapping[str, Any]) -> float:
    """Return the bits of a weight in a compressed-tensors checkpoint, including its share of the scale."""
    weights = find_group(declared).get("weights") or {}
    width, group = weights.get("num_bits"), weights.get("group_size") or 0
    if type(width) is not int:
        raise ValueError("config.json: quantization_config has no num_bits; must be an integer")
    scale = 16 if weights.get("type") == "int" else 8
    return width + scale / group if group > 0 else float(width)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern.removeprefix("re:"), module) is not None
        except re.error as error:
            raise ValueError(f"quantization_config: {pattern} must be a regular expression ({error})") from None
    return fnmatch.fnmatchcase(module, f"*{pattern}*")
