"""A running stage is given another schedule: what the next step does, and what log, metrics and trace say of it."""

import gc
import json
import logging
import weakref
from typing import Any

import torch

from sglang_xshare import Batch, Router, build_plan, hooks, select
from sglang_xshare.stage.placement import Placement
from sglang_xshare.stage.switch import refresh
from sglang_xshare.upstream.batches import Batches
from stage.fake import EXPERTS, TOP_K, XSHARE, Model, bind, find_active, install, make_stage, outcomes, read_figure, run
from stage.switching import PLANS, decode, schedule, switch


def test_the_next_step_selects_by_the_other_plan_in_every_layer(build, reporter):
    model, installed = build(**XSHARE)
    decode(model, reporter)
    for keys in [*PLANS, *reversed(PLANS)]:
        switch(installed, schedule(keys), reporter)
        decode(model, reporter)
        own = {name: value for name, value in keys.items() if name != "phases"}
        expected = select(model.logits, build_plan(own), Router(TOP_K), Batch(), backend="reference")
        assert all(find_active(routed).equal(expected.active) for routed in model.routed), keys
    assert outcomes(installed) == {"policy": 1 + 2 * len(PLANS)}
    assert installed.last_switch.number == 2 * len(PLANS)


def test_a_server_that_masks_padding_goes_on_with_it(build, reporter):
    model, installed = build(3, Batches(always_pad=True), mask_padding_experts=True)
    for keys in (PLANS[0], {"policy": "vanilla"}):
        switch(installed, schedule(keys), reporter)
        run(model, "decode", 8, padding=3)
        assert all(routed is not None for routed in model.routed)
    _, ids = model.routed[0]
    assert set(ids[5:].unique().tolist()) <= set(ids[:5].unique().tolist()), "padding has no active expert of its own"


def test_log_metrics_and_counters_tell_both_plans_apart(build, reporter, caplog, monkeypatch):
    (model, installed), shown = build(**XSHARE), []
    monkeypatch.setattr("sglang_xshare.stage.switch.show_plan", shown.append)
    for _ in range(3):
        decode(model, reporter)
    before, _ = installed.acting.logged.look()
    with caplog.at_level(logging.INFO):
        switch(installed, schedule(PLANS[1]), reporter)
    former, latter = ({"policy": "xshare", "k0": 1, "add": 2}, PLANS[1])
    assert f"switch 1: {json.dumps(former)} -> {json.dumps(latter)}; until now" in caplog.text
    assert f"{before.mean('experts_before'):.1f} -> {before.mean('experts_after'):.1f}" in caplog.text
    assert "policy steps: 3" in caplog.text
    assert shown == [installed.in_force.shown], "in /server_info"
    assert installed.acting.logged.look()[0].layer_steps == installed.acting.since_switch.look()[0].layer_steps == 0
    assert read_figure("info", policy="oea", plan_hash=installed.in_force.hash) == 1
    decode(model, reporter)
    assert installed.acting.since_switch.look()[0].outcomes["policy"] == 1
    assert "policy steps: 1" in hooks.report(reporter)
    assert (read_figure("steps_total", outcome="policy"), read_figure("layer_steps_total")) == (4, 12)


def test_observe_and_back_with_a_trace(build, reporter, tmp_path):
    """Every record says which switch its plan came with; the first of them, the plan."""
    file = tmp_path / "trace.jsonl"
    model, installed = build(2, **XSHARE, expert_policy_trace=str(file))
    observe = {"policy": "observe", "plans": ["oea:k0=1", "xshare:k0=1,add=2"]}
    for keys in (observe, PLANS[0], observe):
        run(model, "decode", 12)  # in flight: the scheduler has not counted it
        switch(installed, schedule(keys), reporter)
    decode(model, reporter)
    hooks.publish(reporter)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [record.get("switch") for record in records] == [None, None, 1, 1, 2, 2, 3, 3]
    assert [record.get("plan") for record in records][2::2] == [observe, PLANS[0], observe]
    assert [record.get("plan") for record in records][3::2] == [None] * 3
    assert [list(record.get("plans", {})) for record in records[::2]] == [[], observe["plans"], [], observe["plans"]]
    assert records[2]["experts_after"] == records[2]["experts_before"] > records[4]["experts_after"]
    assert outcomes(installed) == {"policy": 2, "observed": 2}


def test_a_switch_back_counts_where_captured_graphs_do(build, reporter):
    _, installed = build(expert_policy="observe")
    former = installed.in_force
    switch(installed, schedule(PLANS[0]), reporter)
    assert not installed.in_force.lanes
    assert refresh(installed, former).lanes is former.lanes


def test_what_went_out_of_force_is_forgotten(build, reporter):
    """Plans, schedules and what they have found: a server that switches for days must not grow."""
    model, installed = build(**XSHARE)
    former = []
    for number in range(20):
        decode(model, reporter)
        former += [weakref.ref(installed.in_force), weakref.ref(installed.in_force.schedule)]
        switch(installed, schedule({"policy": "xshare", "add": number}), reporter)
    decode(model, reporter)
    gc.collect()
    assert [one() for one in former] == [None] * 40


def test_ranks_are_counted_wherever_experts_are(reporter, monkeypatch):
    """Expert-parallel ranks: under observe too, not in steps that the model routes unseen, and on again after them."""
    placement = Placement(2, EXPERTS // 2, torch.arange(EXPERTS).expand(3, EXPERTS))
    layers = bind(model := Model(), placement)
    installed = install(monkeypatch, model, make_stage(layers, schedule(PLANS[0])))
    lines, counted = [], []
    for keys in (PLANS[0], {"policy": "vanilla"}, {"policy": "observe"}, PLANS[1]):
        switch(installed, schedule(keys), reporter)
        decode(model, reporter)
        lines.append(hooks.report(reporter))
        counted.append(installed.acting.since_switch.look()[0])
    assert [line.count("fullest rank") for line in lines] == [1, 0, 1, 1]
    assert "active experts of the fullest rank: 16.0 -> 10.0" in lines[0]
    assert ", active experts of the fullest rank: 16.0, xshare would keep" in lines[2]
    assert counted[2].fullest_before == counted[2].fullest_after == 48, "under observe the model's own are active"


def fail(*args: Any) -> None:
    raise OSError("no space left on device")


def test_a_trace_that_cannot_be_written_is_logged_once(build, reporter, caplog, monkeypatch, tmp_path):
    """The server goes on, also in a switch that its other ranks make: one rank exports and writes for all."""
    model, installed = build(**XSHARE, expert_policy_trace=str(tmp_path / "trace"))
    monkeypatch.setattr(installed.trace, "write", fail)
    for _ in range(3):
        decode(model, reporter)
        assert "policy steps: 1" in hooks.report(reporter)
        assert installed.acting.exported.look()[0].layer_steps == 0, "metrics are up to date without the trace"
    switch(installed, schedule(PLANS[0]), reporter)
    assert (installed.last_switch.number, installed.in_force.given["add"]) == (1, 5)
    line = "Expert policy: could not bring the trace up to date; this is logged once"
    assert [record.message for record in caplog.records] == [line]


def test_metrics_that_refuse_a_value_are_logged_once(build, reporter, caplog, monkeypatch, tmp_path):
    """And the trace is written."""
    file = tmp_path / "trace"
    model, installed = build(**XSHARE, expert_policy_trace=str(file))
    monkeypatch.setattr(hooks._reports.exporter, "export", fail)
    monkeypatch.setattr(installed.acting.logged, "read", fail)
    for _ in range(2):
        decode(model, reporter)
        assert hooks.report(reporter) == ""
    assert len(file.read_text().splitlines()) == 2 * len(model.configs)
    names = "metrics (in force)", "metrics (counted)", "metrics (observed)", "log line"
    failures = [f"Expert policy: could not bring the {name}" for name in names]
    assert [record.message.partition(" up to")[0] for record in caplog.records] == failures
