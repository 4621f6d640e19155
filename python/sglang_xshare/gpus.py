"""GPUs by name: what `check` tells SGLang that it runs on, and whose memory bandwidth `estimate` divides by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """One GPU as its vendor's data sheet has it: the peak bandwidth of its memory in GB/s, and the memory in GB (10^9
    bytes); CUDA's compute capability, None for a GPU of AMD.
    """

    bandwidth: float
    memory: float
    capability: tuple[int, int] | None


GPUS = {
    "a100-40gb": Gpu(1555, 40, (8, 0)),
    "a100": Gpu(2039, 80, (8, 0)),
    "l40s": Gpu(864, 48, (8, 9)),
    "rtx4090": Gpu(1008, 24, (8, 9)),
    "h100": Gpu(3350, 80, (9, 0)),
    "h100-pcie": Gpu(2000, 80, (9, 0)),
    "h100-nvl": Gpu(3900, 94, (9, 0)),
    "h200": Gpu(4800, 141, (9, 0)),
    "b200": Gpu(8000, 180, (10, 0)),
    "gb200": Gpu(8000, 186, (10, 0)),
    "b300": Gpu(8000, 288, (10, 3)),
    "rtx5090": Gpu(1792, 32, (12, 0)),
    "rtxpro6000": Gpu(1792, 96, (12, 0)),
    "mi300x": Gpu(5300, 192, None),
    "mi325x": Gpu(6000, 256, None),
    "mi355x": Gpu(8000, 288, None),
}
"""By name; SXM modules where a name has several forms, and the RTX PRO 6000 of workstations (Blackwell)."""


NVIDIA = tuple(name for name, gpu in GPUS.items() if gpu.capability is not None)
"""The names of those that SGLang can be told of on another machine."""


def find_gpu(name: str, offered: Iterable[str] = GPUS) -> Gpu:
    """The GPU of that name, in any case. Raises ValueError with the names that are offered."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ValueError(f"--gpu {name}: not known; allowed is {', '.join(offered)}")
    return gpu
