"""Launches of upstream's fused MoE kernels, and a search for the fastest one."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import inf
from time import monotonic

import torch
from torch import Tensor

from benchmark.gpu.timing import REPLAYS, time_graph

Config = dict[str, int]
CHOICES: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE_N": (32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128, 256),
    "num_stages": (2, 3, 4, 5),
    "num_warps": (4, 8),
    "BLOCK_SIZE_M": (16, 32, 64),
    "GROUP_SIZE_M": (1, 16),
}
"""The tried values of each setting, the largest expected effect first. Blocks in elements, groups in blocks."""
FEW: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE_N": (32, 64, 128),
    "BLOCK_SIZE_K": (64, 128, 256),
    "num_stages": (3, 4, 5),
    "num_warps": (4, 8),
}
"""The choices of a short search. Blocks have 16 rows, because the prebuilt alignment has blocks of 16 rows."""
TRITON_DEFAULTS = {"num_warps": 4, "num_stages": 3}  # upstream's heuristic omits these
NOISE = 0.005  # a launch must be faster by this share to count as faster
TOLERANCE = 0.02  # relative to a value and to the root mean square: three roundings to bf16
SEARCH_REPLAYS = 50


def make_timer(run: Callable[[], Tensor], layers: int = 1) -> Callable[..., float]:
    """Return a function of a launch and replays: median microseconds a layer of `run`, infinite if wrong or failed."""
    from sglang.srt.layers.moe.moe_runner.triton_utils import override_config

    expected = run().clone()

    def time(config: Config, replays: int = REPLAYS) -> float:
        # No exception may leave this block: upstream would keep the override.
        with override_config(config):
            try:
                return time_graph(run, replays) / layers if agree(run(), expected) else inf
            except Exception as error:  # compilers and drivers raise any class of error
                print(f"  {config}: {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # raises if the failure has broken the device for everything after it
        return inf

    return time


def list_few() -> list[Config]:
    """Return every launch that a short search can try, apart from those near upstream's own."""
    return [
        complete({"BLOCK_SIZE_M": 16, "GROUP_SIZE_M": 1} | dict(zip(FEW, one, strict=True)))
        for one in product(*FEW.values())
    ]


def descend(
    starts: Sequence[Config],
    time: Callable[[Config, int], float],
    until: float,
    choices: Mapping[str, tuple[int, ...]] = CHOICES,
) -> tuple[Config, bool]:
    """Search by coordinate descent over `choices` from the fastest of `starts`; each launch is timed once.

    The search ends when no single change is faster, or when `time.monotonic()` reaches `until`; the starts are timed in
    any case. Returns the launch, and whether the first condition ended the search.
    """
    times: dict[tuple[int, ...], float] = {}

    def time_once(config: Config) -> float:
        key = tuple(config[name] for name in CHOICES)
        if key not in times:
            times[key] = time(config, SEARCH_REPLAYS)
        return times[key]

    best = min(starts, key=time_once)
    improved = True
    while improved:
        improved = False
        for name, value in ((name, value) for name, values in choices.items() for value in values):
            if monotonic() >= until:
                return best, False
            candidate = {**best, name: value}
            if time_once(candidate) < (1 - NOISE) * time_once(best):
                best, improved = candidate, True
    return best, True


def complete(config: Mapping[str, int]) -> Config:
    """Return a configuration of upstream's as a point of the search: all of CHOICES and nothing else."""
    return {name: {**TRITON_DEFAULTS, **config}[name] for name in CHOICES}


def agree(found: Tensor, expected: Tensor) -> bool:
    """Return whether two outputs [..., hidden] are the same up to rounding. A value that is not finite never agrees."""
    found, expected = found.float(), expected.float()
    scale = expected.square().mean().sqrt()
    return bool(((found - expected).abs() <= TOLERANCE * (expected.abs() + scale)).all())
