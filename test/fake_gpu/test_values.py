"""The stage in a captured CUDA graph that pages experts, with a GPU's values: it selects by what is loaded in each
replay. Padding, exact rows, observed plans and switches are in test_served_values.py, a broken bound in test_paged.py.
"""

import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import torch

from benchmark.common.paths import ROOT
from sglang_xshare import Batch, Router, build_plan, hooks, select
from sglang_xshare.stage.record.counters import AFTER, EXCEEDED, PAGED
from stage.fake import EXPERTS, TOP_K, Model, forward_batch
from stage.paged_model import REPORTER, SLOTS, PagedModel, put

ROWS = 8


def page(monkeypatch):
    """(a model whose experts are paged by its device, its stage, what says which are loaded [layers, N])"""
    model = PagedModel()
    model.forward = partial(Model.forward, model)
    for paging in model.paging:
        places = torch.full((EXPERTS,), -1, dtype=torch.int32, device="cuda")
        paging.device_executor = SimpleNamespace(residency=SimpleNamespace(expert_slot=places))
    stage = put(monkeypatch, model, device="cuda", k0=1, add=2)
    return model, stage, [paging.device_executor.residency.expert_slot for paging in model.paging]


def capture(monkeypatch, model):
    """(a graph of one step, its logits, the slots of its tokens' keys: 0 for a padding row)"""
    logits = torch.zeros(ROWS, EXPERTS, device="cuda")
    batch = forward_batch("decode", ROWS)
    batch.input_ids, batch.out_cache_loc = (torch.zeros(ROWS, dtype=torch.int64, device="cuda") for _ in range(2))

    def run():
        model.logits = logits
        model.forward(None, None, batch)

    graph = torch.cuda.CUDAGraph()
    with monkeypatch.context() as patch:  # SGLang captures after two eager steps of the same size
        patch.setattr("sglang_xshare.stage.stage.is_capturing", lambda: True)
        run()
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            run()
    return graph, logits, batch.out_cache_loc


def test_a_graph_reads_what_is_loaded(monkeypatch):
    if not os.environ.get("FAKE_GPU_VALUES"):  # values are computed from torch's import on: in a process that has it
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        subprocess.run(command, env={**os.environ, "FAKE_GPU_VALUES": "1"}, check=True, cwd=ROOT)
        return
    monkeypatch.setattr("sglang_xshare.stage.reports.is_first_rank", lambda: True)
    model, stage, places = page(monkeypatch)
    graph, logits, slots = capture(monkeypatch, model)
    plan = build_plan("xshare", k0=1, add=2)
    for seed, live in enumerate((ROWS, 5)):
        draw = torch.Generator().manual_seed(seed)
        given = 2 * torch.randn(ROWS, EXPERTS, generator=draw)
        loaded = [torch.randperm(EXPERTS, generator=draw) < SLOTS for _ in places]
        logits.copy_(given)
        slots.copy_(torch.where(torch.arange(ROWS) < live, 1, 0))
        for place, there in zip(places, loaded, strict=True):
            place.copy_(torch.where(there, 0, -1).int())
        before = stage.acting.counters.totals.cpu()
        graph.replay()
        for layer, there in zip(stage.acting.counters.totals.cpu() - before, loaded, strict=True):
            batch = Batch(torch.arange(ROWS) < live, resident=there, slots=SLOTS)
            wanted = select(given, plan, Router(TOP_K), batch, backend="reference")
            assert layer[AFTER] == wanted.active.sum() <= SLOTS
            assert layer[PAGED] == (wanted.active & ~there).sum()
            assert layer[EXCEEDED] == 0
    hooks.publish(REPORTER)
