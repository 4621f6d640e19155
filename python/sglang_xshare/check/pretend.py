"""A context in which SGLang resolves its arguments as if this machine had a different GPU."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..gpus import NVIDIA, Gpu
from ..upstream.release import is_since

MI300 = (9, 4)
"""The compute capability that torch reports for AMD's architecture gfx942."""
SINCE = "0.5.19"
"""The first release of SGLang with `override_platform`, which replaces the detected platform."""


class CannotPretend(ValueError):
    """The error if SGLang cannot resolve its arguments for a certain GPU on this machine."""


def check_gpu(gpu: Gpu, name: str | None, release: str) -> None:
    """Raise `CannotPretend` if this SGLang release cannot resolve its arguments for a GPU. `name` is from --gpu."""
    if gpu.capability is None:
        raise CannotPretend(
            f"--gpu {name}: SGLang must be imported on a machine with AMD's GPUs; use {', '.join(NVIDIA)}, or no --gpu"
        )
    if not is_since(release, SINCE):
        raise CannotPretend(
            f"--gpu: SGLang {release} resolves its arguments only for its own machine; use SGLang {SINCE} or later, or "
            "no --gpu"
        )


@contextmanager
def pretend(gpu: Gpu) -> Iterator[None]:
    """Make SGLang detect a machine with this GPU, FlashInfer and triton_kernels.

    Facts that SGLang detected when it was imported do not change. For AMD's GPUs there are many such facts, so only the
    resolved MoE runner is correct. SGLang must be `SINCE` or later (see `check_gpu`).
    """
    import torch
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.utils import common

    memory, capability = gpu.memory_bytes / 2**20, gpu.capability or MI300
    with ExitStack() as stack:
        stack.enter_context(override_platform(**_list_facts(gpu)))
        stack.enter_context(_replaced(common, "get_device_memory_capacity", lambda device=None: memory))
        # A machine with a GPU has triton_kernels from sglang-kernel, and gpt-oss uses them if they are installed.
        stack.enter_context(_replaced(common, "is_triton_kernels_available", lambda: True))
        # The defaults of a few models depend on the capability that torch reports, not on the platform.
        stack.enter_context(_replaced(torch.cuda, "get_device_capability", lambda device=None: capability))
        # SGLang's list of quantizations depends on `is_hip`, not on the platform.
        stack.enter_context(_replaced(common, "is_hip", lambda: gpu.capability is None))
        if gpu.capability is not None and "mxfp4" not in QUANTIZATION_METHODS:
            # SGLang registers mxfp4 only at import, on a machine with a GPU or with SGLANG_USE_CPU_ENGINE=1.
            QUANTIZATION_METHODS["mxfp4"] = Mxfp4Config
            stack.callback(QUANTIZATION_METHODS.pop, "mxfp4")
        yield


def _list_facts(gpu: Gpu) -> dict[str, Any]:
    """Return the facts about a platform with this GPU. Their names are the same in all releases from `SINCE` on."""
    capability = gpu.capability or MI300
    major, minor = capability if gpu.capability else (0, 0)
    others = ("is_npu", "is_xpu", "is_musa", "has_amx")
    return {
        **dict.fromkeys(others, False),
        "is_hip": gpu.capability is None,
        "is_cuda": gpu.capability is not None,
        "has_flashinfer": gpu.capability is not None,
        "is_sm90": major == 9,
        "is_hopper_with_cuda_12_3": major == 9,
        "is_sm100": major == 10,
        "is_sm100_or_sm110": major in (10, 11),
        "is_sm120": major == 12,
        "is_blackwell": major in (10, 11, 12),
        "device_sm": major * 10 + minor,
        "device_capability": capability,
    }


@contextmanager
def _replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a module. Also replace it in SGLang's modules that have imported it by name."""
    original = getattr(module, name)
    _rename(module, name, original, function)
    try:
        yield
    finally:
        _rename(module, name, function, original)


def _rename(module: Any, name: str, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    importers = [imported for key, imported in list(sys.modules.items()) if key.startswith("sglang.")]
    for holder in [module, *importers]:
        if vars(holder).get(name) is old:
            setattr(holder, name, new)
