"""What a server shows of its draft depths: log, GET, metrics; and the hooks that show it."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from depth.simulation import WELL, Candidates, Simulation, Traffic, costs
from sglang_xshare import hooks
from sglang_xshare.depth import report as report_module
from sglang_xshare.depth.report import DepthReport
from sglang_xshare.live import control
from sglang_xshare.live.replicas import merge
from sglang_xshare.stage.acceptance import Acceptance
from sglang_xshare.stage.stage import LastSwitch
from sglang_xshare.upstream.drafts import SWITCHES, WORKER
from sglang_xshare.upstream.ranks import share_first

LABELS = {"model_name": "depth-report"}


def make_reporter(enabled: bool = True) -> Any:
    return SimpleNamespace(current_scheduler_metrics_enabled=enabled, metrics_collector=SimpleNamespace(labels=LABELS))


@pytest.fixture
def served(monkeypatch):
    """The report of a server that has settled on 5 drafts for 2 requests."""
    monkeypatch.setattr(report_module, "is_first_rank", lambda: True)
    server = Simulation(noise=0.0)
    server.serve(Traffic(2, WELL, costs(10e-3, 1e-3)), 400)
    server.policy.depths.states[2].depth = 5
    return DepthReport(server.policy)


def read(name: str) -> float | None:
    return REGISTRY.get_sample_value(f"sglang:expert_policy_{name}", LABELS | {"batch_size": "2"})


def test_the_log_line_has_the_depth_in_use(served):
    assert served.log() == ", draft depth 5"
    new = DepthReport(Simulation().policy)
    assert (new.log(), new.describe()) == ("", {"accepted": [], "batch_sizes": []}), "nothing was verified"


def test_get_has_tokens_and_milliseconds_by_batch_size_and_depth(served):
    told = served.describe()
    assert len(told["accepted"]) == 7
    (size,) = told["batch_sizes"]
    assert (size["batch_size"], size["depth"], size["ms"]) == (2, 5, pytest.approx(15, abs=0.01))
    assert size["tokens"] == pytest.approx(Traffic(2, WELL, costs(1, 1)).tokens(5), rel=0.25)
    assert size["verifications"] == served.policy.verifications
    assert [one["depth"] for one in size["by_depth"]] == [0, 1, 3, 5, 7]
    assert [one["ms"] for one in size["by_depth"]] == pytest.approx([10, 11, 13, 15, 17], abs=0.01)
    assert [one["tokens"] for one in size["by_depth"]] == sorted(one["tokens"] for one in size["by_depth"])
    served.policy.depths.forget_times()
    (size,) = served.describe()["batch_sizes"]
    assert (size["ms"], size["by_depth"]) == (None, [])


def test_metrics_are_those_of_the_depth_in_use(served, monkeypatch):
    served.publish(make_reporter(enabled=False))
    assert read("draft_depth") is None
    served.policy.verifications += 1
    served.publish(make_reporter())
    assert (read("draft_depth"), read("draft_step_seconds")) == (5, pytest.approx(0.015, abs=1e-5))
    assert read("draft_tokens") == served.describe()["batch_sizes"][0]["tokens"]
    served.policy.depths.states[2].depth = 3
    served.publish(make_reporter())
    assert read("draft_depth") == 5, "an idle server has nothing new"
    served.policy.verifications += 1
    served.publish(None)
    for is_first, depth in ((False, 5), (True, 3)):
        monkeypatch.setattr(report_module, "is_first_rank", lambda is_first=is_first: is_first)
        served.publish(make_reporter())
        assert read("draft_depth") == depth
    served.policy.depths.forget_times()
    served.policy.verifications += 1
    served.publish(make_reporter())
    assert (read("draft_depth"), read("draft_step_seconds")) == (3, None), "not the former policy's time"


def test_metrics_that_fail_are_logged_once_and_end_nothing(served, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(served._exporter, "export", fail)
    for _ in range(2):
        served.policy.verifications += 1
        served.publish(make_reporter())
    assert len(caplog.messages) == 1


def test_hooks_show_it_beside_the_policy_and_without_one(served, monkeypatch):
    monkeypatch.setattr(hooks, "_depth", served)
    monkeypatch.setattr(hooks, "_reports", None)
    assert hooks.report(make_reporter(enabled=False)) == ", draft depth 5"
    hooks.publish(None)
    reports = SimpleNamespace(log=lambda: ", policy steps: 3", publish=lambda: None)
    monkeypatch.setattr(hooks, "_reports", reports)
    assert hooks.report(make_reporter(enabled=False)) == ", policy steps: 3, draft depth 5"
    answers = iter([{"in_force": {}}, {"switches": 1}])
    monkeypatch.setattr(control, "_ask", lambda *_: next(answers))
    monkeypatch.setattr(hooks, "_control", SimpleNamespace(reports=SimpleNamespace()))
    assert ask() == [{"in_force": {}, "draft_depth": served.describe()}]
    assert ask() == [{"switches": 1}], "the answer to a check"


def test_get_has_it_without_a_policy(served, monkeypatch):
    monkeypatch.setattr(hooks, "_depth", served)
    monkeypatch.setattr(hooks, "_control", None)
    answers = ask()
    assert answers == [{"policy": "vanilla", "in_force": {"policy": "vanilla"}, "draft_depth": served.describe()}]
    assert merge(answers * 2) == answers[0]
    assert ask({"check": {"policy": "xshare"}, "epoch": "1"}) == [], "such a server cannot be switched"


def ask(body: dict[str, Any] | None = None) -> Any:
    request = SimpleNamespace(method=hooks.METHOD, body=body or {})
    return hooks.handle(SimpleNamespace(metrics_reporter=None), request).response


def test_sglang_keeps_its_policy_unless_ours_is_on(monkeypatch):
    monkeypatch.setattr(hooks, "_depth", None)
    monkeypatch.setattr(hooks, "_stage", None)
    monkeypatch.setattr("sglang_xshare.upstream.server.resolved", lambda given: given)
    runner = SimpleNamespace(forward_pass_id=3)
    target = SimpleNamespace(model_runner=runner)
    flags = {"speculative_adaptive": True, "expert_policy": None, "expert_policy_draft_depth": None}

    def choose(**given: object) -> Any:
        worker = SimpleNamespace(server_args=SimpleNamespace(**flags | given), target_worker=target)
        return hooks.choose_depth(worker, make_upstream)

    def make_upstream(initial_steps: int, cfg_path: str | None) -> Candidates:
        assert (initial_steps, cfg_path) == (3, "adaptive.json")
        return Candidates()

    for policy, depth in ((None, None), ("xshare", "upstream"), ("vanilla", None)):
        assert choose(expert_policy=policy, expert_policy_draft_depth=depth) is make_upstream
    policy = choose(expert_policy_draft_depth="throughput")(initial_steps=3, cfg_path="adaptive.json")
    assert hooks._depth.policy is policy
    assert policy._take_first_ranks is share_first, "ranks that decide by their own times wait for each other forever"
    stage = SimpleNamespace(last_switch=LastSwitch(), acceptance=Acceptance())
    monkeypatch.setattr(hooks, "_stage", stage)
    policy = choose(expert_policy="xshare")(initial_steps=3, cfg_path="adaptive.json")
    assert stage.acceptance.width == 8
    policy.get_steps_for_batch(1)
    assert policy._launched[-1][3:] == (3, 0)
    monkeypatch.setattr("sglang_xshare.depth.start.resolved", lambda given: given)
    monkeypatch.setattr("sglang_xshare.depth.start.list_sizes", lambda runner, config: [runner, config.expert_policy])
    assert policy._list_captured() == [runner, "xshare"]
    for line, is_logged in ((f"{SWITCHES}: steps 3 -> 5", False), ("out of memory", True)):
        record = logging.makeLogRecord({"msg": line})
        assert bool(logging.getLogger(WORKER).filter(record)) is is_logged
