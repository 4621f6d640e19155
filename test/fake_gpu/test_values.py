"""The stage captured in a CUDA graph and replayed, with the values that a GPU would compute: what it counts is what the
reference selects from the same logits.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from benchmark.common.paths import ROOT

if not os.environ.get("FAKE_GPU_VALUES"):

    def test_in_a_process_that_computes():
        """Values are computed from torch's import on."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        subprocess.run(command, env={**os.environ, "FAKE_GPU_VALUES": "1"}, check=True, cwd=ROOT)

else:
    import torch

    from sglang_xshare import Batch, Router, build_plan, select
    from sglang_xshare.policies.schedule import build_schedule
    from sglang_xshare.stage.batches import Batches
    from stage.fake import EXPERTS, TOP_K, Model, forward_batch

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
        monkeypatch.setattr("sglang_xshare.stage.stage.show_plan", lambda plan: None)

    def capture(model, stage, rows=ROWS):
        """(a graph of one step, its logits, a function that says how many rows are live)"""
        logits = torch.zeros(rows, EXPERTS, device="cuda")
        batch = forward_batch("decode", rows)
        batch.input_ids = torch.zeros(rows, dtype=torch.int64, device="cuda")
        batch.out_cache_loc = torch.zeros(rows, dtype=torch.int64, device="cuda")

        def run():
            model.logits = logits
            model.forward(None, None, batch)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
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
        stage = attach(
            model,
            Batches((ROWS,)),
            device="cuda",
            expert_policy="xshare",
            expert_policy_config={"k0": 1, "add": 4},
        )
        graph, logits, set_live = capture(model, stage)
        for seed, (live, add) in enumerate(((8, 4), (5, 4), (8, 1), (3, 6))):
            plan = {"policy": "xshare", "k0": 1, "add": add}
            stage.switch(build_schedule("xshare", {"k0": 1, "add": add}, speculative=False), REPORTER)
            given = 2 * torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(seed))
            logits.copy_(given)
            set_live(live)
            before = stage.counters.totals.cpu()
            graph.replay()
            steps, _, active, kept, *_ = (stage.counters.totals.cpu() - before)[0].tolist()
            expected = find_expected(given, plan, live)
            assert (steps, active) == (1, expected[0]), (live, add)
            assert kept == pytest.approx(expected[1], rel=1e-5)

    def test_observing_the_same_again_goes_on_counting(attach):
        model = Model(2)
        plans = {"plans": ["xshare:k0=1,add=4"]}
        stage = attach(model, Batches((ROWS,)), device="cuda", expert_policy="observe", expert_policy_config=plans)
        graph, _, set_live = capture(model, stage)
        set_live(ROWS)
        (spelling,) = stage.observation.counters
        for steps in (1, 2):
            graph.replay()
            assert stage.observation.counters[spelling].totals.cpu()[:, 0].tolist() in ([steps] * 2, [1] * 2)
            stage.switch(build_schedule("observe", plans, speculative=False), REPORTER)
