"""A server with graphs switches to any policy: by new numbers, by graphs captured again, or, to vanilla, without."""

import logging
from collections import Counter
from itertools import permutations
from typing import Any

import pytest

from sglang_xshare.policies import VANILLA
from sglang_xshare.policies.bounds import open_up
from sglang_xshare.selection.triton_kernel.budgets import encode
from sglang_xshare.stage.frame import Assignment
from sglang_xshare.stage.record.counters import Reader
from sglang_xshare.stage.stage import Stage
from sglang_xshare.stage.step import StepKey
from sglang_xshare.upstream.batches import Batches
from stage.fake import XSHARE, allows_graph, flags, forward_batch, outcomes, run
from stage.switching import SIZES, Capturing, schedule, switch

POLICIES = {
    "vanilla": {"policy": "vanilla"},
    "observe": {"policy": "observe", "plans": ["xshare:k0=1,add=2"]},
    "xshare by mass": {"policy": "xshare", "k0": 1, "mass": 0.6},
    "xshare by add": {"policy": "xshare", "k0": 1, "add": 2},
    "oea": {"policy": "oea", "k0": 2, "kmax": 6},
    "lynx-lat": {"policy": "lynx-lat", "retain": 6},
    "moe-spec": {"policy": "moe-spec", "budget": 6, "phases": ["decode"]},
}


@pytest.fixture
def serve(build, monkeypatch):
    """Call it with a policy for a stage whose graphs have been captured, and what captures them."""

    def start(keys: dict[str, Any]) -> tuple[Stage, Capturing]:
        asked = flags(**keys) if keys["policy"] != "vanilla" else {"mask_padding_experts": True}
        model, installed = build(2, Batches(SIZES), **asked)
        capture = Capturing(monkeypatch, model, installed)
        capture()
        return installed, capture

    return start


def find_faults(installed: Stage) -> list[str]:
    """The captured sizes and layers that would select otherwise than the policy in force says."""
    faults = []
    places = [(key, *place) for key, layers in installed.graphs.captured.items() for place in layers.items()]
    for key, layer, kept in places:
        wanted = installed.in_force.find(layer, key).plan
        if key in installed.graphs.stale:
            assert not allows_graph(key.rows)
        elif kept.buffer is None:
            faults += [f"{layer.layer_id}, {key}"] if kept.plan != wanted else []
        else:
            own = open_up(kept.buffer.plan, layer.router) if wanted is None or wanted is VANILLA else wanted
            same = kept.buffer.values.tolist() == encode(own).tolist()
            faults += [] if same or installed.in_force.lanes else [f"{layer.layer_id}, {key}"]
    if list(installed.graphs._lanes) != list(installed.in_force.lanes) and not installed.graphs.stale:
        faults.append("lanes")
    return faults


@pytest.mark.parametrize(("former", "latter"), list(permutations(POLICIES, 2)))
def test_every_pair(serve, reporter, former, latter):
    installed, capture = serve(POLICIES[former])
    assert find_faults(installed) == []
    captured = capture.times
    seconds = switch(installed, schedule(POLICIES[latter]), reporter)
    assert installed.in_force.given == POLICIES[latter]
    assert find_faults(installed) == []
    assert capture.times == captured + (seconds is not None)
    if latter == "vanilla":
        assert seconds is None
    if latter == "observe":
        assert seconds is not None
    switch(installed, schedule(POLICIES[former]), reporter)
    assert find_faults(installed) == []


@pytest.mark.parametrize(
    ("change", "outcome", "acts"),
    [
        ({"add": 3}, "policy", True),
        ({"min_rows": 9}, "min_rows", False),
        ({"max_rows": 7}, "max_rows", False),
        ({"layers": {"0-1": {"policy": "vanilla"}}}, "override", False),
        ({"policy": "vanilla"}, "vanilla", False),
        ({"policy": "observe", "plans": ["xshare:k0=1,add=2"]}, "observed", False),
    ],
    ids=lambda change: ",".join(change) if isinstance(change, dict) else None,
)
def test_a_replay_counts_as_the_active_policy(serve, reporter, change, outcome, acts):
    """Not as the policy of the capture: the counters agree with what the requests of the forward are told."""
    installed, _ = serve(POLICIES["xshare by add"])
    keys = change if "policy" in change else POLICIES["xshare by add"] | change
    assert (switch(installed, schedule(keys), reporter) is not None) == (outcome == "observed")
    former = Counter(outcomes(installed))
    batch = forward_batch("decode", 7)  # padded to the graph of 8 rows
    told = installed.end_forward(batch, installed.begin_forward(batch))
    assert (told.is_step, told.acts) == (True, acts)
    interval, _ = Reader(installed.acting.counters).look()
    assert Counter(interval.outcomes) - former == Counter([outcome])


def test_a_capture_is_refused_where_it_is_not_allowed(serve, reporter):
    installed, capture = serve(POLICIES["xshare by add"])
    in_force = installed.in_force
    line = r"^CUDA graphs would have to be captured again \(graphs of 2, 8 rows: mass = .*\): \"recapture\" is false$"
    with pytest.raises(ValueError, match=line):
        switch(installed, schedule(POLICIES["xshare by mass"]), reporter, recaptures=False)
    assert (installed.in_force, installed.last_switch.number, capture.times) == (in_force, 0, 1)
    assert switch(installed, schedule({"policy": "xshare", "k0": 2, "add": 1}), reporter, recaptures=False) is None


def test_a_capture_waits_until_memory_is_resumed(serve, reporter, caplog):
    """Graphs that follow a switch are written: that needs none of the released memory. The log has the seconds."""
    installed, capture = serve(POLICIES["xshare by add"])
    released = reporter.scheduler.weight_updater.offload_tags
    released.add("cuda_graph")
    with pytest.raises(ValueError, match="memory must be resumed first"):
        switch(installed, schedule(POLICIES["oea"]), reporter)
    assert (installed.in_force.given, installed.last_switch.number) == (POLICIES["xshare by add"], 0)
    assert switch(installed, schedule({"policy": "vanilla"}), reporter) is None
    released.clear()
    with caplog.at_level(logging.INFO):
        assert switch(installed, schedule(POLICIES["oea"]), reporter) is not None
    assert "(graphs captured again in 0." in caplog.text
    assert capture.times == 2


@pytest.mark.parametrize(("failures", "end"), [(1, ""), (2, ", without CUDA graphs")])
def test_a_capture_that_fails_restores_the_policy_before(serve, reporter, caplog, failures, end):
    installed, capture = serve(POLICIES["xshare by add"])
    in_force, capture.failures = installed.in_force, failures
    line = (
        f"^CUDA graphs could not be captured again, the previous policy is active again{end}: Capture .* out of memory$"
    )
    with pytest.raises(ValueError, match=line), caplog.at_level(logging.INFO):
        switch(installed, schedule(POLICIES["oea"]), reporter)
    assert "Expert policy: no switch; until now active experts: " in caplog.text, "counts that no other line reports"
    levels = [record.levelname for record in caplog.records if "captured either" in record.message]
    assert levels == ["ERROR"] * (failures == 2)
    assert caplog.text.count("Expert policy: a capture of CUDA graphs failed") == failures
    assert (installed.in_force, installed.last_switch.number, find_faults(installed)) == (in_force, 0, [])
    assert installed.graphs.rows == (list(SIZES) if failures == 1 else [])
    if failures == 2:
        assert switch(installed, None, reporter) is None
        assert switch(installed, schedule(POLICIES["xshare by add"]), reporter, recaptures=False) is None
        assert installed.graphs.rows == []
    for latter, captures in (({"policy": "xshare", "k0": 1, "add": 3}, failures == 2), (POLICIES["oea"], True)):
        assert (switch(installed, schedule(latter), reporter) is not None) == captures
        assert (installed.graphs.rows, find_faults(installed)) == (list(SIZES), [])


def test_lost_graphs_that_a_weight_update_captures_are_not_captured_again(serve, reporter):
    installed, capture = serve(POLICIES["xshare by add"])
    capture.failures = 2
    with pytest.raises(ValueError, match="without CUDA graphs"):
        switch(installed, schedule(POLICIES["oea"]), reporter)
    capture()
    assert switch(installed, schedule({"policy": "xshare", "k0": 1, "add": 3}), reporter) is None
    assert find_faults(installed) == []


def test_sizes_are_those_that_sglang_captures(build, reporter, monkeypatch):
    """With a request pool of 37 it captures 37 rows, which no list has: padding is masked there, and numbers follow."""
    model, installed = build(1, Batches((8, 36)), **XSHARE)
    installed.find_batches = lambda rows: Batches((8, 37))
    Capturing(monkeypatch, model, installed).capture(37)
    assert installed.in_force.batches.may_pad(37)
    assert not installed.in_force.batches.may_pad(36)
    assert switch(installed, schedule({"policy": "xshare", "k0": 1, "add": 6}), reporter, recaptures=False) is None
    [[kept]] = (layers.values() for layers in installed.graphs.captured.values())
    wanted = installed.in_force.find(installed.layers[0], StepKey("decode", 37)).plan
    assert kept.buffer.values.tolist() == encode(wanted).tolist()


def test_sizes_are_read_in_every_capture_and_in_no_other_step(build, reporter, monkeypatch):
    """SGLang captures prefills too, on a server without decode graphs as well."""
    (model, installed), sizes = build(1, Batches((8, 36)), **XSHARE), [8, 37]
    installed.find_batches = lambda rows: Batches((8, sizes[-1]))
    capture = Capturing(monkeypatch, model, installed)
    capture.running = True
    run(model, "prefill", 40, alone=True)
    assert installed.in_force.batches.captured == (8, 36)
    run(model, "decode", 8, alone=True)
    run(model, "decode", 8, alone=True)
    capture.running = False
    assert installed.in_force.batches.captured == (8, 37)
    sizes.pop()
    run(model, "decode", 8)
    assert installed.in_force.batches.captured == (8, 37)
    installed.graphs.captured[StepKey("decode", 8)] = {installed.layers[0]: Assignment()}
    assert switch(installed, schedule(POLICIES["oea"]), reporter) is not None
    assert installed.in_force.batches.captured == (8, 8)


def test_a_step_of_a_stale_graph_runs_without_it(serve, reporter):
    """Under vanilla after `kmax`, which no graph of it routes with."""
    installed, capture = serve(POLICIES["oea"])
    switch(installed, None, reporter)
    assert [allows_graph(rows) for rows in (1, 2, 7, 9)] == [True, False, False, True]
    assert installed.allows_graph(forward_batch("idle", 0)), "SGLang asks for a batch without requests too"
    run(capture.model, "decode", 8)
    assert capture.model.routed == [None, None]
