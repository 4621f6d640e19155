"""The real server, policy off and on: its answers, the experts that its MoE runner receives, its reports of them."""

import json
import re
from collections import Counter

import pytest

from served.answers import LAYERS, NEW_TOKENS, SERVERS
from served.release import LATEST, OLDEST, both_releases, oldest_takes_long
from served.steps import agrees
from sglang_xshare.policies import list_policies
from sglang_xshare.policies.description import describe
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.stage.record.figures import hash_plan

SELECTING = [
    *(("xshare", LATEST), ("four policies", LATEST)),
    *(pytest.param(name, LATEST, marks=pytest.mark.long) for name in ("four more policies", "sizes")),
    *(pytest.param(name, OLDEST, marks=pytest.mark.long) for name in ("full budget", "xshare")),
]
XSHARE, FULL, OEA = "xshare:k0=1,add=8", "xshare:k0=1,add=64", "oea:k0=3"
"""The plans that server "observe" compares."""


def schedule_of(name):
    """The schedule of a server, by its flags."""
    return build_schedule(SERVERS[name][1], json.loads(SERVERS[name][3]), speculative=False)


@oldest_takes_long
@pytest.mark.parametrize("name", ["off", "vanilla"])
def test_off_and_vanilla_answer_as_the_unpatched_release_and_never_enter_the_stage(name, release, served):
    unpatched, answers = served("unpatched", release).tokens, served(name, release)
    assert answers.tokens == unpatched
    assert len({token for answer in unpatched[0] for token in answer}) > 20, "answers too poor to tell anything"
    assert all(len(answer) == NEW_TOKENS for answer in unpatched[0])
    assert answers.calls("DECODE"), "the probe counted"
    assert not any(call["stage"] for call in answers.records), "the stage's code was loaded"
    assert all(call["after"] == call["before"] for call in answers.records)
    assert answers.metrics == {}
    assert "xpert policy" not in answers.log
    assert answers.info["expert_policy"] == (None if name == "off" else "vanilla")


@both_releases
def test_full_budget_answers_as_vanilla(release, served):
    """All releases answer alike, so the oldest one is compared with the latest one's unpatched tree."""
    answers = served("full budget", release)
    assert answers.tokens == served("unpatched").tokens
    assert answers.metrics["steps policy"] == answers.forwards("DECODE", least=2) > 0


@pytest.mark.parametrize(("name", "release"), SELECTING)
def test_each_step_selects_as_the_reference_and_is_counted_as_the_runner_received_it(name, release, served):
    """Every decode step counts: a batch that was admitted in two groups has steps of other sizes too."""
    answers, schedule = served(name, release), schedule_of(name)
    assert all(call["stage"] for call in answers.records)
    for call in answers.calls("EXTEND"):
        assert (call["before"], pytest.approx(call["rows"], rel=1e-5)) == (call["after"], call["kept"])
    decoded = answers.calls("DECODE")
    assert all(agrees(call, schedule, speculative=False) for call in decoded)
    reasons = {call["rows"]: schedule.reason_to_skip("decode", call["rows"]) for call in decoded}
    calls = [call for call in decoded if not reasons[call["rows"]] and schedule.plan(call["layer"], call["rows"])]
    layers = sorted({call["layer"] for call in calls})
    for layer in layers if name != "full budget" else ():
        assert sum(call["before"] - call["after"] for call in calls if call["layer"] == layer) > 0, f"layer {layer}"
    metrics = answers.metrics
    for metric, key in (("experts_before", "before"), ("experts_after", "after"), ("rows", "rows")):
        assert metrics[f"{metric}_total"] == sum(call[key] for call in calls)
    assert metrics["layer_steps_total"] == len(calls) > 0
    assert metrics["kept_mass_total"] == pytest.approx(sum(call["kept"] for call in calls), rel=1e-5)
    steps = Counter(reasons[call["rows"]] or "policy" for call in decoded if call["layer"] == 0)
    assert set(steps) == {"policy", "min_rows"} | ({"max_rows"} if name == "sizes" else set())
    outcomes = {name.removeprefix("steps "): int(value) for name, value in metrics.items() if name.startswith("steps ")}
    steps["prefill"] = answers.forwards("EXTEND")
    assert {outcome: count for outcome, count in outcomes.items() if count} == steps
    assert answers.trace == [
        {
            **{"step": number // len(layers), "phase": "decode", "layer": call["layer"], "batch_size": call["rows"]},
            **{"experts_before": call["before"], "experts_after": call["after"]},
            "kept_mass": pytest.approx(call["kept"] / call["rows"], rel=1e-5),
        }
        for number, call in enumerate(calls)
    ]
    plan = describe(schedule, top_k=8)
    assert f"Expert policy {schedule.policy} on {LAYERS} MoE layers: {json.dumps(plan)}" in answers.log
    assert answers.info["expert_policy_config"] == SERVERS[name][3], "as it was given"
    assert answers.info["internal_states"][0]["expert_policy_config"] == plan
    assert answers.plans == [hash_plan(plan)]


def test_runs_repeat_and_the_decode_log_line_reports_the_policy(served):
    """In intervals of 8 steps here; with overlap scheduling the step after them may have been counted already."""
    for name in ("xshare", "four policies"):
        first, second, _ = served(name).tokens
        assert first == second
    lines = re.findall(
        r"active experts: ([\d.]+) -> ([\d.]+), kept mass: ([\d.]+), policy steps: (\d+)", served("xshare").log
    )
    before, after, kept, steps = map(float, lines[0])
    assert 8 < after < before < 64
    assert 0.5 < kept < 1
    assert 0 < steps <= 9


def test_every_policy_is_served():
    """A new policy must join one of the servers above."""
    named = {"vanilla"}
    for flags in SERVERS.values():
        named |= {flags[1]} if flags else set()
        named |= set(re.findall(r'"policy": "([\w-]+)"', flags[3])) if len(flags) > 2 else set()
    assert named == {policy.name for policy in list_policies()}


@oldest_takes_long
def test_observe_answers_as_a_server_without_a_policy_and_says_what_each_plan_would_have_kept(release, served):
    answers = served("observe", release)
    assert answers.tokens == served("off", release).tokens
    calls = answers.calls("DECODE")
    assert all(call["after"] == call["before"] for call in calls), "the runner got the model's own routing"
    metrics = answers.metrics
    before, rows = metrics["experts_before_total"], metrics["rows_total"]
    assert before == metrics["experts_after_total"] == sum(call["before"] for call in calls)
    assert metrics["kept_mass_total"] == rows == sum(call["rows"] for call in calls)
    assert metrics["steps observed"] == answers.forwards("DECODE") > 0
    assert metrics["steps policy"] == 0
    assert metrics[f"observed_experts_total {XSHARE}"] < 0.8 * before
    assert metrics[f"observed_experts_total {FULL}"] == before
    assert metrics[f"observed_mass_total {FULL}"] == pytest.approx(rows)
    assert 0.5 * rows < metrics[f"observed_mass_total {XSHARE}"] < rows
    assert [(line["batch_size"], line["experts_before"]) for line in answers.trace] == [
        (call["rows"], call["before"]) for call in calls
    ]
    for line in answers.trace:
        assert line["experts_after"] == line["experts_before"] == line["plans"][FULL]["experts_after"]
        assert list(line["plans"]) == [XSHARE, FULL, OEA]
    traced = sum(line["plans"][XSHARE]["experts_after"] for line in answers.trace)
    assert traced == metrics[f"observed_experts_total {XSHARE}"]
    line = re.search(r"active experts: ([\d.]+), batch size: ([\d.]+), observed steps: (\d+).*", answers.log)
    assert line
    assert f", {XSHARE} would keep " in line[0]
    assert 1 < float(line[2]) <= 16
    assert answers.info["expert_policy"] == "observe"
    assert answers.plans == [hash_plan(describe(schedule_of("observe"), 8))]
