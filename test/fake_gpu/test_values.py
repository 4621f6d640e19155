"""The stage in a captured CUDA graph, with a GPU's values: it counts what the reference selects of its logits. Exact
rows, observed plans and a broken bound are in the tests of whole servers, test_served_values.py and test_paged.py.
"""

import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from benchmark.common.paths import ROOT
from stage.switching import switch

if not os.environ.get("FAKE_GPU_VALUES"):

    def test_in_a_process_that_computes():
        """Values are computed from torch's import on."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        subprocess.run(command, env={**os.environ, "FAKE_GPU_VALUES": "1"}, check=True, cwd=ROOT)

else:
    import torch

    from sglang_xshare import Batch, Router, build_plan, select
    from sglang_xshare.policies.schedule import build_schedule
    from sglang_xshare.stage.record.counters import AFTER, EXCEEDED, PAGED
    from sglang_xshare.upstream.batches import Batches
    from stage.fake import EXPERTS, TOP_K, Model, forward_batch
    from stage.paged_model import SLOTS, PagedModel, put

    ROWS = 8
    REPORTER = SimpleNamespace(
        forward_ct_decode=0,
        scheduler=SimpleNamespace(forward_ct=0),
        current_scheduler_metrics_enabled=False,
        is_stats_logging_rank=True,
        metrics_collector=SimpleNamespace(labels={}),
    )

    @pytest.fixture(autouse=True)
    def _alone(monkeypatch):
        monkeypatch.setattr("sglang_xshare.stage.stage.is_first_rank", lambda: True)
        monkeypatch.setattr("sglang_xshare.stage.switch.show_plan", lambda plan: None)

    def xshare(add):
        """The flags of a server."""
        return {"expert_policy": "xshare", "expert_policy_config": {"k0": 1, "add": add}}

    def capture(model, stage, rows=ROWS):
        """(a graph of one step, its logits, a function that says how many rows are live)"""
        logits = torch.zeros(rows, EXPERTS, device="cuda")
        batch = forward_batch("decode", rows)
        batch.input_ids = torch.zeros(rows, dtype=torch.int64, device="cuda")
        batch.out_cache_loc = torch.zeros(rows, dtype=torch.int64, device="cuda")

        def run():
            model.logits = logits
            model.forward(None, None, batch)

        graph = torch.cuda.CUDAGraph()
        with pytest.MonkeyPatch.context() as patch:  # SGLang captures after two eager steps of the same size
            patch.setattr("sglang_xshare.stage.stage.is_capturing", lambda: True)
            run()
            run()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                run()
        slots = torch.arange(1, rows + 1)
        return graph, logits, lambda live: batch.out_cache_loc.copy_(torch.where(slots <= live, slots, 0))

    def find_expected(logits, plan, live):
        """(active experts, kept mass) as the reference has them."""
        batch = Batch(torch.arange(len(logits)) < live)
        chosen = select(logits, build_plan(plan), Router(TOP_K), batch, backend="reference")
        return chosen.active.sum().item(), chosen.kept_mass[:live].sum().item()

    def test_counts_follow_rows_and_switches(attach):
        model = Model(2)
        stage = attach(model, Batches((ROWS,)), device="cuda", **xshare(add=4))
        graph, logits, set_live = capture(model, stage)
        for seed, (live, add) in enumerate(((8, 4), (5, 4), (8, 1), (3, 6))):
            plan = {"policy": "xshare", "k0": 1, "add": add}
            switch(stage, build_schedule("xshare", {"k0": 1, "add": add}, speculative=False), REPORTER)
            given = 2 * torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(seed))
            logits.copy_(given)
            set_live(live)
            before = stage.acting.counters.totals.cpu()
            graph.replay()
            steps, _, active, kept, *_ = (stage.acting.counters.totals.cpu() - before)[0].tolist()
            expected = find_expected(given, plan, live)
            assert (steps, active) == (1, expected[0]), (live, add)
            assert kept == pytest.approx(expected[1], rel=1e-5)

    def page(monkeypatch, slots=SLOTS, **keys):
        """(a model whose experts are paged by its device, its stage, what says which are loaded [layers, N])"""
        model = PagedModel(slots)
        model.forward = partial(Model.forward, model)
        for paging in model.paging:
            places = torch.full((EXPERTS,), -1, dtype=torch.int32, device="cuda")
            paging.device_executor = SimpleNamespace(residency=SimpleNamespace(expert_slot=places))
        stage = put(monkeypatch, model, device="cuda", **keys)
        return model, stage, [paging.device_executor.residency.expert_slot for paging in model.paging]

    def test_a_graph_reads_what_is_loaded(monkeypatch):
        model, stage, places = page(monkeypatch, k0=1, add=2)
        graph, logits, set_live = capture(model, stage)
        set_live(ROWS)
        for seed in range(2):
            given = 2 * torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(seed))
            logits.copy_(given)
            draw = torch.Generator().manual_seed(seed)
            loaded = [torch.randperm(EXPERTS, generator=draw) < SLOTS for _ in places]
            for place, there in zip(places, loaded, strict=True):
                place.copy_(torch.where(there, 0, -1).int())
            before = stage.acting.counters.totals.cpu()
            graph.replay()
            counts = stage.acting.counters.totals.cpu() - before
            for layer, there in zip(counts, loaded, strict=True):
                batch = Batch(resident=there, slots=SLOTS)
                plan = build_plan({"policy": "xshare", "k0": 1, "add": 2})
                wanted = select(given, plan, Router(TOP_K), batch, backend="reference")
                assert layer[AFTER] == wanted.active.sum() <= SLOTS
                assert layer[PAGED] == (wanted.active & ~there).sum()
                assert layer[EXCEEDED] == 0
        stage.publish(REPORTER)
