"""Launch configurations of SGLang's fused MoE kernels, and a search for the fastest one."""

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
"""The values to try for each parameter. Parameters with a large effect come first.

Block sizes are in elements, and group sizes are in blocks.
"""
FEW: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE_N": (32, 64, 128),
    "BLOCK_SIZE_K": (64, 128, 256),
    "num_stages": (3, 4, 5),
    "num_warps": (4, 8),
}
"""The values for a short search. BLOCK_SIZE_M is 16, because the prebuilt alignment has blocks of 16 rows."""
TRITON_DEFAULTS = {"num_warps": 4, "num_stages": 3}  # SGLang's heuristic omits these parameters
NOISE = 0.005  # the smallest relative improvement that counts
TOLERANCE = 0.02  # relative to a value plus the root mean square; results are rounded to bf16 three times
SEARCH_REPLAYS = 50


def make_timer(run: Callable[[], Tensor], layers: int = 1) -> Callable[..., float]:
    """Return a function that measures `run` with a launch configuration.

    The function returns the median time of a layer in microseconds. It returns infinity if the launch fails or gives a
    wrong result. Its second argument is the number of graph replays.
    """
    from sglang.srt.layers.moe.moe_runner.triton_utils import override_config

    expected = run().clone()

    def time(config: Config, replays: int = REPLAYS) -> float:
        # No exception may leave this block, because SGLang would then keep the override.
        with override_config(config):
            try:
                return time_graph(run, replays) / layers if agree(run(), expected) else inf
            except Exception as error:  # compilers and drivers can raise any type of exception
                print(f"  {config}: {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # raises an error if the failure has broken the device
        return inf

    return time


def list_few() -> list[Config]:
    """Return all launch configurations that can be made from `FEW`.

    A short search can also try configurations that are similar to SGLang's own one.
    """
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
    """Search for the fastest launch configuration with coordinate descent.

    The search starts from the fastest configuration in `starts` and measures each configuration once. It ends when no
    change of a single parameter is faster, or when `time.monotonic()` reaches `until`. All configurations in `starts`
    are measured in any case. Return the best configuration, and whether the search ended before `until`.
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
    """Return a configuration with exactly the parameters of `CHOICES`. Missing parameters get Triton's defaults."""
    return {name: {**TRITON_DEFAULTS, **config}[name] for name in CHOICES}


def agree(found: Tensor, expected: Tensor) -> bool:
    """Return whether two outputs [..., hidden] are equal up to rounding. Infinite or NaN values in `found` differ."""
    found, expected = found.float(), expected.float()
    scale = expected.square().mean().sqrt()
    return bool(((found - expected).abs() <= TOLERANCE * (expected.abs() + scale)).all())
