"""Graphs that are captured anew, as after a weight update, under other plans than the first: what they count."""

from typing import Any

import pytest
import torch

from sglang_xshare import SelectionPlan, hooks
from sglang_xshare.selection.triton_kernel.budgets import NUMBERS, Budgets, list_steps
from sglang_xshare.stage.graphs import Graphs
from sglang_xshare.stage.placement import Balance, Placement
from sglang_xshare.stage.record.counters import AFTER, STEPS
from sglang_xshare.stage.stage import Stage
from sglang_xshare.stage.step import StepKey
from sglang_xshare.upstream.batches import Batches
from stage.fake import EXPERTS, XSHARE, Model, flags, read_figure, run
from stage.switching import Capturing, decode, note_selections, schedule, switch


@pytest.fixture
def record(monkeypatch):
    """Call it to capture 8 rows as SGLang does: (the plan the first layer launches, the numbers it reads then)."""
    launched = note_selections(monkeypatch)

    def capture(installed: Stage, model: Model) -> tuple[SelectionPlan, Budgets]:
        Capturing(monkeypatch, model, installed).capture(8)
        return launched[-1].plan, launched[-1].budgets

    return capture


def read_add(plan: SelectionPlan, budgets: Budgets) -> int:
    """What such a graph adds at its next replay."""
    return int(budgets.values[NUMBERS.index("add")]) if list_steps(plan)["add"] else 0


def test_graphs_captured_anew_follow_the_next_switch(build, reporter, record):
    """As after a weight update: from add = 2, under 0, to 6."""
    model, installed = build(1, Batches((8,)), **XSHARE)
    assert read_add(*record(installed, model)) == 2
    for add in (0, 6):
        switch(installed, schedule({"policy": "xshare", "k0": 1, "add": add}), reporter)
        graph = record(installed, model)
        assert read_add(*graph) == add
        switch(installed, schedule({"policy": "xshare", "k0": 1, "add": 5}), reporter)
        assert read_add(*graph) == 5


def test_graphs_captured_anew_under_vanilla_count_again_under_a_policy(build, reporter, record, monkeypatch):
    """Also what each rank loads, which no step under vanilla counts."""
    model, installed = build(1, Batches((8,)), **XSHARE)
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


def test_observe_posted_again_goes_on_counting_where_graphs_do(build, reporter, record):
    """They add to tensors that nobody else may get, and nothing is exported twice."""
    keys = {"policy": "observe", "plans": ["xshare:k0=1,add=2"]}
    model, installed = build(2, Batches((8,)), **flags(**keys))
    installed.graphs.begin_capture(StepKey("decode", 8), installed.in_force)
    [first] = installed.in_force.lanes
    decode(model, reporter, 8)
    switch(installed, schedule(keys), reporter)
    assert list(installed.in_force.lanes) == [first]
    decode(model, reporter, 8)
    assert "xshare:k0=1,add=2 would keep" in hooks.report(reporter)
    totals = first.counters.totals
    assert totals[:, STEPS].tolist() == [2, 2]
    assert read_figure("observed_experts_total", plan=keys["plans"][0]) == totals[:, AFTER].sum()
    installed.graphs = Graphs()
    switch(installed, schedule(keys | {"plans": ["oea:k0=1"]}), reporter)
    assert [lane.name for lane in installed.in_force.lanes] == ["oea:k0=1"]
