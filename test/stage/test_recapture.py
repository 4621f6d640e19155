"""Graphs that are captured anew, as after a weight update, under other plans than the first: what they count."""

import functools
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY

from sglang_xshare import SelectionPlan, hooks
from sglang_xshare.selection.triton_kernel.budgets import NUMBERS, Budgets, list_steps
from sglang_xshare.stage.graphs import Graphs
from sglang_xshare.stage.layer import Layer
from sglang_xshare.stage.placement import Balance, Placement
from sglang_xshare.stage.record.counters import AFTER, STEPS
from sglang_xshare.stage.stage import Stage
from sglang_xshare.stage.step import StepKey
from sglang_xshare.upstream.batches import Batches
from stage.fake import EXPERTS, XSHARE, Model, run
from stage.switching import decode, schedule, switch


@pytest.fixture(autouse=True)
def _on_the_first_rank(monkeypatch):
    monkeypatch.setattr("sglang_xshare.stage.reports.is_first_rank", lambda: True)
    monkeypatch.setattr("sglang_xshare.stage.switch.show_plan", lambda plan: None)


@pytest.fixture
def record(monkeypatch):
    """Call it to capture 8 rows as SGLang does: (the plan the first layer launches, the numbers it reads then)."""
    recorded = False
    monkeypatch.setattr("sglang_xshare.stage.stage.is_capturing", lambda: True)
    monkeypatch.setattr("sglang_xshare.stage.stage.is_recorded", lambda: recorded)
    monkeypatch.setattr("sglang_xshare.stage.switch.wait_for_device", lambda device: None)

    def capture(installed: Stage, model: Model) -> tuple[SelectionPlan, Budgets]:
        nonlocal recorded
        installed.device = "cuda"
        layer = installed.layers[0]
        launched: list[tuple[SelectionPlan, Budgets]] = []
        original = Layer.select

        def note(layer: Layer, logits: Any, plan: Any, batch: Any, slots: Any, tally: Any, budgets: Any) -> Any:
            launched.append((plan, budgets))
            return original(layer, logits, plan, batch, slots, tally, budgets)

        monkeypatch.setattr(layer, "select", functools.partial(note, layer))
        run(model, "decode", 8, alone=True)
        recorded = True
        run(model, "decode", 8, alone=True)
        recorded = False
        return launched[-1]

    return capture


def read_add(plan: SelectionPlan, budgets: Budgets) -> int:
    """What such a graph adds at its next replay."""
    return int(budgets.values[NUMBERS.index("add")]) if list_steps(plan)["add"] else 0


def test_graphs_captured_anew_follow_the_next_switch(attach, reporter, record):
    """As after a weight update: from add = 2, under 0, to 6."""
    model = Model(1)
    installed = attach(model, Batches((8,)), **XSHARE)
    assert read_add(*record(installed, model)) == 2
    for add in (0, 6):
        switch(installed, schedule({"policy": "xshare", "k0": 1, "add": add}), reporter)
        graph = record(installed, model)
        assert read_add(*graph) == add
        switch(installed, schedule({"policy": "xshare", "k0": 1, "add": 5}), reporter)
        assert read_add(*graph) == 5


def test_graphs_captured_anew_under_vanilla_count_again_under_a_policy(attach, reporter, record, monkeypatch):
    """Also what each rank loads, which no step under vanilla counts."""
    model = Model(1)
    installed = attach(model, Batches((8,)), **XSHARE)
    placement = Placement(2, EXPERTS // 2, torch.arange(EXPERTS)[None])
    balance = installed.balance = Balance(placement, [0], "cpu")
    counted: list[Any] = []
    monkeypatch.setattr(balance, "count", counted.append)
    record(installed, model)
    assert counted
    switch(installed, schedule({"policy": "vanilla"}), reporter)
    counted.clear()
    run(model, "decode", 8)
    assert counted == []
    graph = record(installed, model)
    assert len(counted) == 1
    switch(installed, schedule({"policy": "xshare", "k0": 1, "add": 5}), reporter)
    assert read_add(*graph) == 5


def test_observe_posted_again_goes_on_counting_where_graphs_do(attach, reporter, record):
    """They add to tensors that nobody else may get, and nothing is exported twice."""
    keys = {"policy": "observe", "plans": ["xshare:k0=1,add=2"]}
    model = Model(2)
    installed = attach(model, Batches((8,)), expert_policy="observe", expert_policy_config={"plans": keys["plans"]})
    installed.graphs.assign_for_capture(StepKey("decode", 8), installed.in_force)
    [first] = installed.in_force.lanes
    decode(model, reporter, 8)
    switch(installed, schedule(keys), reporter)
    assert list(installed.in_force.lanes) == [first]
    decode(model, reporter, 8)
    assert "xshare:k0=1,add=2 would keep" in hooks.report(reporter)
    totals = first.counters.totals
    labels = {"model_name": "fake", "plan": keys["plans"][0]}
    kept = REGISTRY.get_sample_value("sglang:expert_policy_observed_experts_total", labels)
    assert totals[:, STEPS].tolist() == [2, 2]
    assert kept == totals[:, AFTER].sum()
    installed.graphs = Graphs()
    switch(installed, schedule(keys | {"plans": ["oea:k0=1"]}), reporter)
    assert [lane.name for lane in installed.in_force.lanes] == ["oea:k0=1"]
