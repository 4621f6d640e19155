"""A server under `observe` answers as one without a policy, and says what other policies would have kept."""

import re

import pytest

from served.answers import SERVERS
from served.release import oldest_takes_long
from sglang_xshare.policies.description import describe
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.stage.record.figures import hash_plan

XSHARE, FULL, OEA = "xshare:k0=1,add=8", "xshare:k0=1,add=64", '{"policy": "oea", "k0": 3}'


@oldest_takes_long
def test_it_answers_as_a_server_without_a_policy_and_says_what_each_plan_would_have_kept(release, served):
    answers = served("observe", release)
    assert answers.tokens == served("off", release).tokens
    calls = answers.calls("DECODE")
    assert all(call["after"] == call["before"] for call in calls), "the runner got the model's own routing"
    metrics = answers.metrics
    assert metrics["experts_before_total"] == metrics["experts_after_total"] == sum(call["before"] for call in calls)
    assert metrics["kept_mass_total"] == metrics["rows_total"] == sum(call["rows"] for call in calls)
    assert metrics["steps observed"] == answers.forwards("DECODE") > 0
    assert metrics["steps policy"] == 0
    before, rows = metrics["experts_before_total"], metrics["rows_total"]
    experts = {plan: metrics[f"observed_experts_total {plan}"] for plan in (XSHARE, FULL)}
    assert experts[XSHARE] < 0.8 * before
    assert experts[FULL] == before
    assert metrics[f"observed_mass_total {FULL}"] == pytest.approx(rows)
    assert 0.5 * rows < metrics[f"observed_mass_total {XSHARE}"] < rows


def test_the_trace_has_every_plan(served):
    answers = served("observe")
    calls = answers.calls("DECODE")
    assert [(line["batch_size"], line["experts_before"]) for line in answers.trace] == [
        (call["rows"], call["before"]) for call in calls
    ]
    for line in answers.trace:
        assert line["experts_after"] == line["experts_before"] == line["plans"][FULL]["experts_after"]
        assert list(line["plans"]) == [XSHARE, FULL, OEA]
    assert (
        sum(line["plans"][XSHARE]["experts_after"] for line in answers.trace)
        == (answers.metrics[f"observed_experts_total {XSHARE}"])
    )


def test_the_log_and_the_server_say_what_is_compared(served):
    answers = served("observe")
    line = re.search(r"active experts: ([\d.]+), batch size: ([\d.]+), observed steps: (\d+).*", answers.log)
    assert line
    assert f", {XSHARE} would keep " in line[0]
    assert 1 < float(line[2]) <= 16
    flags = SERVERS["observe"]
    assert answers.info["expert_policy"] == flags[1]
    schedule = build_schedule("observe", {"plans": [XSHARE, FULL, {"policy": "oea", "k0": 3}]}, speculative=False)
    assert answers.plans == [hash_plan(describe(schedule, 8))]
