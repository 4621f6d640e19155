"""What the host launches of the Triton kernel, and what it says where that fails: with a stand-in for the kernel."""

import pytest
import torch

from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.selection.triton_kernel import launch
from sglang_xshare.selection.triton_kernel.launch import TWO_LAUNCHES


class Kernel:
    """Notes the grid and the keywords of every launch. A cooperative one fails where it is said to."""

    def __init__(self, fails=False):
        self.fails = fails
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **keys: self.launch(grid, keys)

    def launch(self, grid, keys):
        self.launches.append((grid, keys))
        if self.fails and keys.get("launch_cooperative_grid"):
            raise RuntimeError("Triton Error [CUDA]: operation not supported")

    @property
    def halves(self):
        """(programs, votes, routes, cooperative) of every launch."""
        return [
            (*grid, keys["votes"], keys["routes"], keys.get("launch_cooperative_grid", False))
            for grid, keys in self.launches
        ]


@pytest.fixture
def kernel(monkeypatch):
    """The stand-in, on a device that has counters."""
    stand_in = Kernel()
    monkeypatch.setattr(launch, "select_kernel", stand_in)
    monkeypatch.setattr(launch, "INTERPRETED", True)
    monkeypatch.setattr(launch, "_find_counter", lambda device, programs: torch.zeros(32, dtype=torch.int32))
    return stand_in


def run(rows, experts=128):
    return select(torch.zeros(rows, experts), build_plan("xshare"), Router(8), Batch(), backend="triton")


def test_one_program_is_one_plain_launch(kernel):
    run(16)
    assert kernel.halves == [(1, True, True, False)]


def test_several_programs_are_one_cooperative_launch(kernel):
    run(64)
    assert kernel.halves == [(8, True, True, True)]


def test_without_a_counter_they_are_two(kernel, monkeypatch):
    monkeypatch.setattr(launch, "_find_counter", lambda device, programs: None)
    run(64)
    assert kernel.halves == [(8, True, False, False), (8, False, True, False)]


def test_the_environment_rules_out_cooperative_launches(monkeypatch):
    """Before it looks at the device: one without such launches may say so in ways of its own."""
    monkeypatch.setenv(TWO_LAUNCHES, "1")
    assert launch._find_counter(torch.device("cuda"), 8) is None


def test_a_failed_cooperative_launch_names_the_way_around_it(kernel):
    kernel.fails = True
    with pytest.raises(RuntimeError, match=r"a cooperative launch of 8 programs failed \(Triton .* not supported\)"):
        run(64)
    with pytest.raises(RuntimeError, match="SGLANG_XSHARE_TWO_LAUNCHES=1 in the environment does without"):
        run(64)
    run(16)
