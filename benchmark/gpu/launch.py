"""How upstream's fused MoE kernels are launched, and a search for the fastest way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
"""What is tried of each, in the order of what it is expected to bring. Blocks in elements, groups in blocks."""
TRITON_DEFAULTS = {"num_warps": 4, "num_stages": 3}  # what upstream's heuristic leaves out
NOISE = 0.005  # a launch must be faster by this share to count as faster
TOLERANCE = 0.02  # of a value and of their root mean square: three roundings to bf16
SEARCH_REPLAYS = 50


@dataclass(frozen=True)
class Found:
    """What a search ended with. `us` is infinite where no launch was given a time; `finished`: no single change is
    faster.
    """

    config: Config
    us: float
    finished: bool


class Trials:
    """Times launches of the same work. Only one that computes what upstream's own launch does is given a time.

    `run` does the work and returns its output; `layers` divides its time. `failed` counts launches that did not compile
    or run, `wrong` those with another output.
    """

    def __init__(self, run: Callable[[], Tensor], layers: int = 1) -> None:
        self._run, self._layers = run, layers
        self._expected = run().clone()
        self._times: dict[tuple[int, ...], float | None] = {}
        self.failed = self.wrong = 0

    @property
    def tried(self) -> int:
        """How many launches, with the failed and the wrong ones."""
        return len(self._times)

    def time_own(self) -> float:
        """Median microseconds a layer of upstream's own launch."""
        return time_graph(self._run) / self._layers

    def time(self, config: Config) -> float | None:
        """The same of a launch, by few replays and each launch only once; None where it fails or is wrong."""
        key = tuple(config[name] for name in CHOICES)
        if key not in self._times:
            self._times[key] = self.confirm(config, SEARCH_REPLAYS)
        return self._times[key]

    def confirm(self, config: Config, replays: int = REPLAYS) -> float | None:
        """The same anew, by all replays."""
        from sglang.srt.layers.moe.moe_runner.triton_utils import override_config

        # No exception may leave this block: upstream would go on with the override.
        with override_config(config):
            try:
                if agree(self._run(), self._expected):
                    return time_graph(self._run, replays) / self._layers
                self.wrong += 1
                return None
            except Exception as error:  # compilers and drivers raise what they like
                self.failed += 1
                print(f"  {config}: {type(error).__name__}: {str(error).partition(chr(10))[0]}", flush=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # raises where the failure has broken the device for everything after it
        return None


def descend(starts: Sequence[Config], time: Callable[[Config], float | None], until: float) -> Found:
    """Coordinate descent over CHOICES from the fastest of `starts`. It ends where no single change is faster, or when
    `time.monotonic()` reaches `until`; the starts are timed in any case.
    """
    times = [time(start) or inf for start in starts]
    us = min(times)
    best = starts[times.index(us)]
    improved = True
    while improved:
        improved = False
        for name, values in CHOICES.items():
            for value in values:
                if monotonic() >= until:
                    return Found(best, us, finished=False)
                candidate = {**best, name: value}
                found = time(candidate) or inf
                if found < (1 - NOISE) * us:
                    best, us, improved = candidate, found, True
    return Found(best, us, finished=True)


def complete(config: Mapping[str, int]) -> Config:
    """A configuration of upstream's as a point of the search: all of CHOICES and nothing else."""
    return {name: {**TRITON_DEFAULTS, **config}[name] for name in CHOICES}


def agree(found: Tensor, expected: Tensor) -> bool:
    """Whether two outputs [..., hidden] are the same but for rounding. A non-finite value never is."""
    found, expected = found.float(), expected.float()
    scale = expected.square().mean().sqrt()
    return bool(((found - expected).abs() <= TOLERANCE * (expected.abs() + scale)).all())
