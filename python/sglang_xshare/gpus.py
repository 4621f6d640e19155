"""A table of GPUs for `check`, with their memory and bandwidth."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU.

    `bandwidth` is the peak memory bandwidth in GB/s. `memory` is the vendor's number of GB. `capability` is CUDA's
    compute capability, or None for AMD's GPUs.
    """

    bandwidth: float
    memory: float
    capability: tuple[int, int] | None

    @property
    def memory_bytes(self) -> int:
        """Return the memory in bytes, including the part that the driver reserves. A vendor's GB is 2^30 bytes."""
        return round(self.memory * 2**30)


# The comment above each group names the source of its numbers, as of November 2026. The sources quote the vendors' data
# sheets. The data sheets themselves were not available.
GPUS = {
    # https://glennklockwood.com/garden/processors/A100
    "a100-40gb": Gpu(1555, 40, (8, 0)),
    "a100": Gpu(2039, 80, (8, 0)),
    # https://www.itcreations.com/nvidia-gpu/nvidia-l40s-gpu-accelerator
    "l40s": Gpu(864, 48, (8, 9)),
    # https://cputronic.com/gpu/compare/nvidia-geforce-rtx-4090-vs-nvidia-rtx-pro-5000-72-gb-blackwell
    "rtx4090": Gpu(1008, 24, (8, 9)),
    # https://www.anandtech.com/show/18780/nvidia-announces-h100-nvl-max-memory-server-card-for-large-language-models
    "h100": Gpu(3350, 80, (9, 0)),
    "h100-pcie": Gpu(2000, 80, (9, 0)),
    "h100-nvl": Gpu(3900, 94, (9, 0)),
    # https://openmetal.io/resources/blog/how-the-h200-is-built-for-memory-bound-ai-workloads/
    "h200": Gpu(4800, 141, (9, 0)),
    # https://verda.com/blog/gb300-nvl72-architecture lists the B200 and B300 of HGX systems. The driver of a B200
    # reports 7.67 TB/s: https://github.com/pytorch/ao/pull/4002
    "b200": Gpu(7700, 180, (10, 0)),
    "b300": Gpu(7700, 270, (10, 3)),
    # https://gpu.blog/gpus/nvidia-gb200-nvl72 says 8 TB/s, but the page above says 7.7 TB/s. MLPerf's GB200 systems
    # have 186 GB.
    "gb200": Gpu(8000, 186, (10, 0)),
    # https://www.spheron.network/blog/nvidia-rtx-5090-specs/
    "rtx5090": Gpu(1792, 32, (12, 0)),
    # https://gpu.name/posts/nvidia-unveils-rtx-pro-6000-blackwell-gpu-with-24-064-cores-and-96gb-memory
    "rtxpro6000": Gpu(1792, 96, (12, 0)),
    # https://docs.vultr.com/inference-cookbook/rocm/getting-started/hardware-requirements
    "mi300x": Gpu(5300, 192, None),
    "mi325x": Gpu(6000, 256, None),
    # https://aiwiki.ai/wiki/amd_instinct_mi355x
    "mi355x": Gpu(8000, 288, None),
}
"""GPUs by name. If a GPU exists in several forms, its name means the SXM module. `rtxpro6000` is for workstations."""
NVIDIA = tuple(name for name, gpu in GPUS.items() if gpu.capability is not None)
"""Names of NVIDIA's GPUs. For these GPUs `check` can resolve arguments on a machine without the GPU."""


def find_gpu(name: str) -> Gpu:
    """Return the GPU with this name, in upper or lower case. Raises ValueError if the name is unknown."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ValueError(f"--gpu {name}: must be one of {', '.join(GPUS)}")
    return gpu
