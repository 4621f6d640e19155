"""What SGLang runs a model's experts with, as far as the configuration tells, and what else could run them.

Read in upstream's quantization methods (`srt/layers/quantization`), releases 0.5.17 to 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ..stage.upstream.server import is_release, model_config, resolved, routes_own_rows, spell
from .runners import list_runners

Capability = tuple[int, int]

# By --quantization's name; the others are spelt in words by `_read_fp8` and `_read_compressed`.
NAMES = {
    "none": "bf16",
    "modelopt_fp4": "NVFP4",
    "modelopt_mixed": "mixed NVFP4",
    "modelopt_fp8": "fp8 by tensor",
    "mxfp4": "MXFP4",
}
# Runners that run such experts, the best first, for where SGLang's own choice cannot be served.
FITTING: dict[str, tuple[str, ...]] = {
    "bf16": ("triton",),
    "fp8 by block": ("triton",),
    "fp8 by tensor": ("triton",),
    "fp8 by block (compressed-tensors)": ("triton",),
    "fp8 by channel (compressed-tensors)": ("triton",),
    "fp8 by tensor (compressed-tensors)": ("triton",),
    "MXFP4 in an fp8 checkpoint": ("marlin",),
    "NVFP4": ("marlin",),
    "mixed NVFP4": ("marlin",),
    "NVFP4 (compressed-tensors)": ("flashinfer_trtllm",),
    "MXINT4": ("triton", "marlin"),
    "int4 (compressed-tensors)": ("triton", "marlin"),
    # Last triton, which holds such experts as bf16.
    "MXFP4": ("triton_kernel", "marlin", "triton"),
    "mxfp8": ("deep_gemm",),
    "nvfp4_online": ("flashinfer_trtllm", "flashinfer_trtllm_routed"),
}
# With these flashinfer_trtllm takes router logits alone (modelopt_quant.py, compressed_tensors_w4a4_mxint4_moe.py), or
# was not followed.
ROUTED_IN_KERNEL = (
    *("fp8 by tensor", "fp8 by block (compressed-tensors)", "fp8 by channel (compressed-tensors)"),
    *("fp8 by tensor (compressed-tensors)", "MXINT4"),
)
# Their kernels behind flashinfer_mxfp4 are others than gpt-oss's, and were not followed.
OTHER_MXFP4 = ("MXFP4 in an fp8 checkpoint",)
# With SGLANG_USE_AITER, layers left to themselves run these on AMD's aiter, or on triton where it lacks the shape.
BY_AITER = (
    *("bf16", "fp8 by block", "fp8 by tensor", "fp8 by channel (compressed-tensors)"),
    *("MXFP4 in an fp8 checkpoint", "MXFP4"),
)
# Formats that run one kernel whatever the runner: w4afp8.py, humming.py.
OWN_KERNELS = {"w4afp8": "cutlass_w4a8_moe", "humming": "humming"}


@dataclass(frozen=True)
class Experts:
    """How a server would run its experts: the `runner`, auto where its layers choose triton or marlin, or what is not
    known before they are loaded; the `format` of the weights in words; the GPU's `capability`, None on AMD; whether
    AMD's `aiter` is on.
    """

    runner: str
    format: str
    capability: Capability | None
    aiter: bool
    ep_size: int

    @property
    def served(self) -> bool:
        """Whether a policy can be served with it."""
        return self.serves(self.runner)

    def serves(self, runner: str) -> bool:
        """Whether a policy can be served with this runner for these experts."""
        if runner.startswith("flashinfer_trtllm") and self.format in ROUTED_IN_KERNEL:
            return False
        if runner == "flashinfer_mxfp4" and self.format in OTHER_MXFP4:
            return False
        return runner in ("auto", *list_runners())

    def list_fitting(self) -> list[str]:
        """The runners that can be served and that run these experts here, the best first."""
        return [runner for runner in FITTING.get(self.format, ()) if self.serves(runner) and self._runs(runner)]

    def _runs(self, runner: str) -> bool:
        """Whether a runner of `FITTING` runs these experts on this GPU."""
        if self.capability is None:
            return runner == "triton" and (not self.aiter or _is_laid_out_for_triton(self.format))
        if runner == "marlin":
            return self.capability >= ((9, 0) if self.format == "MXFP4" else (8, 0))
        if runner.startswith("flashinfer_trtllm"):
            return (10, 0) <= self.capability < (11, 0)
        if runner == "triton_kernel":
            return self.ep_size == 1 and _has_triton_kernels(self.capability)
        return True


def read_experts(server_args: Any) -> Experts | None:
    """Read a server's resolved arguments. None where its device is no GPU, or none is there, and behind an all-to-all
    dispatcher, which leaves auto to its layers: what runs is checked once loaded.
    """
    config = resolved(server_args)
    if str(config.device) != "cuda" or routes_own_rows(config):
        return None
    is_amd = _is_amd()
    capability = None if is_amd else _read_capability()
    if capability is None and not is_amd:
        return None
    experts = Experts(
        runner=spell(config.moe_runner_backend),
        format=read_format(model_config(server_args), config.quantization),
        capability=capability,
        aiter=is_amd and _uses_aiter(),
        ep_size=config.ep_size,
    )
    return experts if experts.runner != "auto" else replace(experts, runner=_choose_in_layers(experts))


def _choose_in_layers(experts: Experts) -> str:
    """What layers choose while the server's runner is auto; auto as in `Experts`."""
    if experts.format in OWN_KERNELS:
        return OWN_KERNELS[experts.format]
    if experts.capability is None:
        return "aiter" if experts.aiter and experts.format in BY_AITER else "auto"
    if experts.capability >= (10, 0):
        # modelopt_quant.py: create_moe_runner; compressed_tensors_w4a4_nvfp4_moe.py: create_moe_runner
        if experts.format in ("NVFP4", "mixed NVFP4"):
            return "flashinfer_trtllm"
        if experts.format == "NVFP4 (compressed-tensors)":
            return "flashinfer_cutlass"
    return "auto"


def ranks_logits(config: Any) -> bool:
    """Whether a server's MoE runner ranks the logits itself where a policy chooses: gpt-oss's on sm100 does, too.

    `config` holds its resolved arguments.
    """
    runner = spell(config.moe_runner_backend)
    if runner != "flashinfer_mxfp4" or str(config.device) != "cuda":
        return runner == "triton_kernel"
    return (10, 0) <= (_read_capability() or (0, 0)) < (11, 0)


def read_format(model: Any, quantization: str | None) -> str:
    """The format of a model's experts in words, or its quantization's name: from upstream's `ModelConfig` and the
    resolved --quantization.
    """
    name = getattr(model, "quantization", None) or quantization or "none"
    config = find_quantization(model)
    if name == "fp8":
        return _read_fp8(config, bool(getattr(model, "is_fp4_experts", False)))
    if name == "compressed-tensors":
        return _read_compressed(config)
    return NAMES.get(name, name)


def find_quantization(model: Any, names: Sequence[str] = ("quantization_config",)) -> Mapping[str, Any]:
    """The quantization that a model's configuration declares under the first of these names that it has; that of
    Kimi-K2.5's text model is the model's. Empty where there is none.
    """
    for name, config in product(names, (model.hf_config, model.hf_text_config)):
        declared = getattr(config, name, None)
        if declared:
            return declared if isinstance(declared, Mapping) else declared.to_dict()
    return {}


def _read_fp8(config: Mapping[str, Any], has_fp4_experts: bool) -> str:
    if has_fp4_experts:
        return "MXFP4 in an fp8 checkpoint"
    return "fp8 by block" if config.get("weight_block_size") else "fp8 by tensor"


def _read_compressed(config: Mapping[str, Any]) -> str:
    """The format of a compressed-tensors checkpoint: its first group's, as upstream takes one for all experts."""
    groups = list((config.get("config_groups") or {}).values())
    weights = (groups[0].get("weights") or {}) if groups else {}
    bits, kind, group = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    activations = groups[0].get("input_activations") if groups else None
    if "mxfp4" in str(config.get("format")) or (bits, kind, group) == (4, "float", 32):
        return "MXFP4"
    if (bits, kind) == (4, "float"):
        return "NVFP4 (compressed-tensors)" if activations else "NVFP4 weights"
    if (bits, kind) == (8, "float"):
        return f"fp8 by {weights.get('strategy')} (compressed-tensors)"
    if (bits, kind) == (4, "int") and not activations:
        is_mx = group == 32 and weights.get("symmetric", True) and not weights.get("dynamic")
        return "MXINT4" if is_mx else "int4 (compressed-tensors)"
    return "compressed-tensors"


def _is_amd() -> bool:
    try:
        from sglang.srt.runtime_context import get_platform
    except ImportError:  # before 0.5.19
        from sglang.srt.utils import is_hip

        return bool(is_hip())
    return bool(get_platform().is_hip)


def _uses_aiter() -> bool:
    from sglang.srt.utils import get_bool_env_var

    return bool(get_bool_env_var("SGLANG_USE_AITER"))


def _is_laid_out_for_triton(experts: str) -> bool:
    """Whether a server with aiter leaves such weights as triton reads them where its runner is triton.

    fp8 blocks only from 0.5.23 on (fp8.py: runner_is_aiter); fp8 by tensor or channel, and MXFP4, are shuffled for
    aiter whatever the runner.
    """
    if experts == "fp8 by block":
        return is_release("0.5.23")
    return experts == "bf16"


def _read_capability() -> Capability | None:
    import torch

    try:
        major, minor = torch.cuda.get_device_capability()
    except (RuntimeError, AssertionError):  # no driver; a torch without CUDA
        return None
    return major, minor


def _has_triton_kernels(capability: Capability) -> bool:
    """Whether OpenAI's triton_kernels runs MXFP4 here: its layouts are Hopper's and the B200's, and on these it crashes
    with drivers from 595 on (upstream's gpt_oss.py).
    """
    from sglang.srt.utils import common

    if not (9, 0) <= capability < (11, 0) or not common.is_triton_kernels_available():
        return False
    return capability < (10, 0) or common.get_nvidia_driver_version() < (595,)
