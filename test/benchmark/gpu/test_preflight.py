"""The checks before a run: each fails in one line, and never with a traceback."""

import sys

import pytest

import sglang_xshare
from benchmark.gpu import preflight
from benchmark.gpu.preflight import EXPERTS, GRAPH_ROWS, TOP_K
from benchmark.gpu.run import TASKS
from benchmark.gpu.shapes import list_trials
from sglang_xshare import Batch, Router, build_plan
from sglang_xshare.selection.triton_kernel import tile
from sglang_xshare.selection.triton_kernel.tile import Shape, count_programs, make_tile


def test_what_eagle3_imports_on_a_gpu_alone_is_named(monkeypatch):
    """On the CPU nothing imports it: EAGLE-3 passed the other checks, and died when it started."""
    monkeypatch.setattr(preflight, "CUDA_MODULES", preflight.CUDA_MODULES[:1])
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    with pytest.raises(RuntimeError, match="deep_gemm needs deep_gemm"):
        preflight.CHECKS["eagle3"]()
    (needs,) = [task.needs for task in TASKS if task.experiment == "eagle3"]
    assert "eagle3" in needs


def test_a_kernel_that_does_not_compile_is_named_by_experts():
    """Here every launch fails, as that of a kernel that does not compile."""
    with pytest.raises(RuntimeError, match=r"^32 experts: "):
        preflight.CHECKS["compilation-32"]()


def test_our_kernel_is_held_to_the_reference(monkeypatch):
    preflight.check_selection("cpu", "torch")
    original = sglang_xshare.select

    def select(*args, backend):
        found = original(*args, backend=backend)
        if backend != "reference":
            found.topk_ids.masked_fill_(~args[3].valid[:, None], 5)  # padding that routes to an expert
        return found

    monkeypatch.setattr(sglang_xshare, "select", select)
    with pytest.raises(RuntimeError, match="topk_ids of 125 rows in a graph of 128: not the reference's"):
        preflight.check_selection("cpu", "torch")


def test_our_kernel_is_launched_cooperatively(monkeypatch):
    """Whatever shapes the file holds, or a GPU will have written to it."""
    plan, batch = build_plan("xshare", k0=1, add=24), Batch()
    most = max(trial.rows for trial in list_trials() if trial.experts == EXPERTS and trial.tile == trial.rows)

    def programs():
        return count_programs(make_tile(plan, Router(TOP_K), batch, GRAPH_ROWS, EXPERTS), plan, batch, GRAPH_ROWS)

    assert programs() > 1
    monkeypatch.setattr(tile, "SHAPES", [Shape(EXPERTS, {most: 32}, (32, 16))])
    assert programs() > 1
