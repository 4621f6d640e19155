"""A SGLang plugin that lends a CPU server what some of upstream's modes ask of CUDA whatever the device: host memory,
plain where CUDA would pin it, a wait for the device, and expert ids of 32 bits.

It takes it for `--enable-return-routed-experts`, for the hierarchical cache, for LoRA, for a model's own draft and for
EPLB.
"""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from served.answers import install_plugin


def install(scratch: Path) -> None:
    """Put the plugin where `install_probe` puts its own."""
    install_plugin(scratch, "served.host:lend")


def lend() -> None:
    """Called by upstream's `load_plugins()` in every process."""
    if multiprocessing.parent_process() is None:
        return
    from sglang.srt.mem_cache.pool_host import mha
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
    from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

    capture = RoutedExpertsCapturer.capture
    RoutedExpertsCapturer.capture = lambda self, layer_id, topk_indices: capture(self, layer_id, topk_indices.int())
    ALLOC_MEMORY_FUNCS["cpu"] = allocate
    mha.transfer_kv_direct = transfer
    for module in (torch.cuda, torch.cpu):
        for name in ("synchronize", "empty_cache"):
            setattr(module, name, lambda *args: None)
    setattr(torch.Tensor, "pin_memory", lambda tensor, *args: tensor)  # noqa: B010 - mypy knows another signature
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, never_pinned(getattr(torch, name)))


def never_pinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Torch's function without its `pin_memory`."""
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


def allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    """What upstream's allocators return."""
    return torch.empty(dims, dtype=dtype, device=device)


def transfer(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Copy slots of every layer's keys and values, as upstream's kernel does."""
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]
