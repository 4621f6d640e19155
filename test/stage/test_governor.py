"""A governor in a running stage: when it looks, what it moves, and what log, metrics and GET tell of it."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.admission.model import check_governor, check_moves
from sglang_xshare.policies.governor import Governor, Search, most_moves
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.refusal import ExpertPolicyError
from sglang_xshare.stage.batches import Batches
from sglang_xshare.stage.governor import govern
from stage.fake import EXPERTS, TOP_K, Model, forward_batch

ROWS, EVERY = 12, 4
GOVERNOR = {"kept_mass": 0.9, "add": [1, 24], "every": EVERY}
GOVERNED: dict[str, Any] = {"expert_policy": "xshare", "expert_policy_config": {"k0": 1, "governor": GOVERNOR}}


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch):
    monkeypatch.setattr("sglang_xshare.stage.stage.is_first_rank", lambda: True)
    monkeypatch.setattr("sglang_xshare.stage.stage.show_plan", lambda plan: None)
    monkeypatch.setattr("sglang_xshare.stage.governor.add_over_ranks", lambda counts: (counts, 1))


@pytest.fixture
def serve(attach):
    """Call it with flags for (the stage, a function that runs one step of some mode as a model runner does)."""

    def make(batches: Batches | None = None, **flags: Any) -> tuple[Any, Any]:
        model = Model()
        model.logits = torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(0))
        installed = attach(model, batches, **flags)
        forward = govern(lambda: installed.governor, lambda batch: model.forward(None, None, batch))

        def step(mode: str = "decode", rows: int = ROWS) -> None:
            forward(forward_batch(mode, rows))

        return installed, step

    return make


def smallest(floor: float) -> int:
    """The smallest budget that keeps the mass, of the same logits in every step."""
    logits = torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(0))
    kept = (select(logits, build_plan("xshare", k0=1, add=add), Router(TOP_K), Batch()).kept_mass for add in range(25))
    return next(add for add, mass in enumerate(kept) if mass.mean() >= floor)


def test_it_finds_the_smallest_budget_that_holds_and_stays(serve):
    installed, step = serve(**GOVERNED)
    governed = installed.governor
    assert installed.plans.given["add"] == 24
    for _ in range((most_moves(governed.governor) + 1) * (EVERY + 1)):
        step()
    found, moves = smallest(0.9), governed.moves
    assert 1 < found < 24
    assert governed.describe() == {"budget": found, "settled": True, "moves": moves, "kept_mass": governed.kept_mass}
    assert installed.plans.given == {"policy": "xshare", "k0": 1, "add": found, "governor": GOVERNOR}
    for _ in range(20 * EVERY):
        step()
    assert (installed.plans.given["add"], governed.moves) == (found, moves)
    assert moves <= most_moves(governed.governor)


def test_it_decides_on_as_many_steps_as_asked_for_and_not_on_prefills(serve, monkeypatch):
    """On the `every` steps before one more, of which the host need not wait."""
    installed, step = serve(**GOVERNED)
    looked: list[float] = []

    def stay(governor: Governor, search: Search, kept: float) -> Search:
        looked.append(installed.counters.outcomes[0].item())
        return search

    monkeypatch.setattr("sglang_xshare.stage.governor.decide", stay)
    for _ in range(3 * (EVERY + 1) + 1):
        step()
    assert looked == [EVERY + 1, 2 * (EVERY + 1), 3 * (EVERY + 1)]
    for _ in range(3 * (EVERY + 1)):
        step("prefill")
    assert len(looked) == 3


def test_a_budget_that_changes_nothing_keeps_everything(serve):
    """Steps that the largest budget leaves to the model are not counted as policy, and must not hold it there."""
    installed, step = serve(**GOVERNED | {"expert_policy_config": {"k0": 2, "governor": GOVERNOR}})
    for _ in range(EVERY + 2):
        step()
    assert installed.counters.outcomes[0] == 1
    assert installed.governor.kept_mass == 1
    assert installed.governor.search.budget < 24


def test_a_switch_ends_it_and_another_begins(serve, reporter):
    installed, step = serve(**GOVERNED)
    step()
    installed.switch(build_schedule("xshare", {"k0": 1, "add": 3}, False), reporter)
    assert "governor" not in installed.plans.given
    installed.switch(build_schedule("xshare", {"k0": 1, "add": 6, "governor": GOVERNOR}, False), reporter)
    assert installed.plans.given["add"] == 6
    for _ in range(EVERY + 2):
        step()
    assert installed.governor.moves == 1


def test_log_and_metrics_tell_the_budget(serve, reporter):
    installed, step = serve(**GOVERNED)
    for _ in range(3 * (EVERY + 1) + 1):
        step()
    reporter.forward_ct_decode += 1
    governed = installed.governor
    assert f", governed add: {governed.search.budget} after {governed.moves} moves" in installed.report(reporter)

    def value(name: str) -> float | None:
        return REGISTRY.get_sample_value(f"sglang:expert_policy_{name}", {"model_name": "fake"})

    assert value("governor_budget") == governed.search.budget
    assert value("governor_moves_total") == governed.moves > 0
    plans = [
        json.loads(sample.labels["plan"])
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "sglang:expert_policy_info"
    ]
    assert [plan["add"] for plan in plans] == [24], "no series a move"
    installed.switch(build_schedule("xshare", {"add": 3}, False), reporter)
    assert "governed" not in installed.report(reporter)


def test_graphs_are_captured_by_the_smallest_budget(serve):
    """It begins once they are there: a graph captured by a large one may not select at all."""
    installed, step = serve(Batches(captured=(ROWS,)), **GOVERNED)
    step()
    assert installed.plans.given["add"] == 1
    layer = installed.layers[0][1]
    installed.graphs._captured[layer, "decode", 1, 1] = None  # too small for a policy
    step()
    assert installed.plans.given["add"] == 24
    assert installed.governor.moves == 0


def test_graphs_that_cannot_follow_stop_the_server(serve):
    """They have the plan's own numbers in them."""
    installed, step = serve(Batches(captured=(ROWS,)), **GOVERNED)
    layer = installed.layers[0][1]
    installed.graphs._captured[layer, "decode", ROWS, 1] = build_plan("xshare", k0=1, add=1)
    with pytest.raises(RuntimeError, match="--expert-policy-config governor: CUDA graphs of 12 rows") as error:
        step()
    assert "\n" not in str(error.value)


def test_ranks_decide_on_what_all_have_counted(serve, monkeypatch):
    """A rank that has lost more than it may follows the others, which have not."""

    def add(counts: torch.Tensor) -> tuple[torch.Tensor, int]:
        others = counts.clone()
        others[3] = others[4]  # kept mass: all of it
        return counts + 99 * others, 100

    monkeypatch.setattr("sglang_xshare.stage.governor.add_over_ranks", add)
    installed, step = serve(**GOVERNED)
    for _ in range(10 * (EVERY + 1)):
        step()
    assert installed.governor.search.budget == 1


@pytest.fixture
def reporter():
    """Upstream's, of a server with --enable-metrics; what is registered is gone after the test."""
    before = set(REGISTRY._collector_to_names)
    yield SimpleNamespace(
        forward_ct_decode=0,
        scheduler=SimpleNamespace(forward_ct=0),
        metrics_collector=SimpleNamespace(labels={"model_name": "fake"}),
        current_scheduler_metrics_enabled=True,
        is_stats_logging_rank=True,
    )
    for metric in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(metric)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"pp_size": 2}, "--pp-size 2: a pipeline's stages run different steps; allowed is 1"),
        ({"device": "cuda", "speculative_adaptive": True}, "--speculative-adaptive captures graphs"),
    ],
)
def test_servers_whose_budget_could_not_move_are_refused(changes, line):
    config = SimpleNamespace(**{"device": "cpu", "pp_size": 1, "speculative_adaptive": False} | changes)
    check_governor(build_schedule("xshare", {"k0": 1}, False), config)
    with pytest.raises(ExpertPolicyError, match=f"--expert-policy-config governor on: .*{line}"):
        check_governor(build_schedule("xshare", {"governor": GOVERNOR}, False), config)


EVERYWHERE = "add: .* overrides set it for every layer and batch size; allowed is a budget that some step reads"
STATIC = {"ranking": "static", "order": list(range(8)), "phases": ["decode"]}


@pytest.mark.parametrize(
    ("policy", "key", "keys", "captured", "line"),
    [
        ("xshare", "add", {"by_batch": {"2-64": {"add": 8}}, "max_tokens": 64}, (), EVERYWHERE),
        ("xshare", "add", {"layers": {"0-3": {"add": 8}}}, (), EVERYWHERE),
        ("moe-spec", "budget", STATIC, (4,), "budget: .* ranking = 'static' is part of a CUDA graph"),
    ],
)
def test_a_governor_that_nothing_follows_is_refused(policy, key, keys, captured, line):
    schedule = build_schedule(policy, keys | {"governor": {"kept_mass": 0.9, key: [2, 6]}}, False)
    lowest, highest = (end.plans(range(4)) for end in schedule.ends)
    with pytest.raises(ExpertPolicyError, match=f"--expert-policy-config governor {line}"):
        check_moves(schedule, lowest, highest, Batches(captured=captured))
