"""What a selection launches: kernels, by a stand-in for them, and operations of torch."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_xshare.selection.torch_backend import rows, shortlist, vectorized
from sglang_xshare.selection.triton_kernel import launch


class Kernel:
    """Notes the grid and the keywords of every launch."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **keys: self.launches.append((grid, keys))

    @property
    def phases(self):
        """(programs, first phase, last phase, cooperative) of every launch."""
        names = "begins", "ends", "launch_cooperative_grid"
        return [(*grid, *(keys.get(name, False) for name in names)) for grid, keys in self.launches]


class Dispatched(TorchDispatchMode):
    """Notes every operation of torch that would launch a kernel: all but allocations and views."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in ("empty", "new_empty", "empty_like", "view", "select", "as_strided", "detach", "alias"):
            self.operations.append(name)
        return function(*args, **kwargs or {})


@pytest.fixture
def kernel(monkeypatch):
    """The stand-in, on a device that has counters."""
    stand_in = Kernel()
    monkeypatch.setattr(launch, "select_kernel", stand_in)
    monkeypatch.setattr(launch, "INTERPRETED", True)
    counter = torch.zeros(32, dtype=torch.int32)
    monkeypatch.setattr(launch, "_find_counter", lambda device, programs: counter)
    return stand_in


@pytest.fixture
def forgets():
    """Afterwards selection has no tensor cached: what it made in a mode of torch's must not be found without it."""
    yield
    for module in (rows, shortlist, vectorized):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
