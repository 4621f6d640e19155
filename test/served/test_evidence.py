"""What a server says of its policy is what its MoE runner received, and the plan that it was given."""

import json
import re

import pytest

from served.answers import LAYERS, SERVERS, Answers
from served.release import LATEST, OLDEST
from sglang_xshare.policies.description import describe
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.stage.record.figures import hash_plan

EVIDENCE = [
    *((name, LATEST) for name in ("xshare", "four policies")),
    pytest.param("four more policies", LATEST, marks=pytest.mark.long),
    *(pytest.param(name, OLDEST, marks=pytest.mark.long) for name in ("full budget", "xshare")),
]


@pytest.mark.parametrize(("name", "release"), EVIDENCE)
def test_metrics_and_trace_are_what_the_runner_received(name, release, served):
    answers = served(name, release)
    calls = answers.calls("DECODE", least=2)
    assert all(call["stage"] for call in answers.records)
    assert len(calls) == LAYERS * answers.forwards("DECODE", least=2) > 0
    metrics = answers.metrics
    assert metrics["layer_steps_total"] == len(calls)
    assert metrics["experts_before_total"] == sum(call["before"] for call in calls)
    assert metrics["experts_after_total"] == sum(call["after"] for call in calls)
    assert metrics["rows_total"] == sum(call["rows"] for call in calls)
    assert metrics["kept_mass_total"] == pytest.approx(sum(call["kept"] for call in calls), rel=1e-5)
    outcomes = {name.removeprefix("steps "): value for name, value in metrics.items() if name.startswith("steps ")}
    assert outcomes == {
        **{"policy": answers.forwards("DECODE", least=2), "prefill": answers.forwards("EXTEND"), "observed": 0},
        **{"min_rows": answers.forwards("DECODE", most=1), "phase": 0, "max_rows": 0, "override": 0, "unchanged": 0},
        **{"vanilla": 0, "no_context": 0},
    }
    seen = [
        {
            **{"step": number // LAYERS, "phase": "decode", "layer": call["layer"], "batch_size": call["rows"]},
            **{"experts_before": call["before"], "experts_after": call["after"]},
            "kept_mass": pytest.approx(call["kept"] / call["rows"], rel=1e-5),
        }
        for number, call in enumerate(calls)
    ]
    assert answers.trace == seen


@pytest.mark.parametrize("name", ["xshare", "four policies"])
def test_prefill_is_routed_as_without_a_policy(name, served):
    def routed(answers: Answers) -> set[tuple[int, tuple[int, ...]]]:
        return {(call["layer"], tuple(row)) for call in answers.calls("EXTEND") for row in call["ids"]}

    assert routed(served(name)) == routed(served("vanilla"))


def test_decode_log_line_reports_the_policy(served):
    """In intervals of 8 steps here; with overlap scheduling the step after them may have been counted already."""
    lines = re.findall(
        r"active experts: ([\d.]+) -> ([\d.]+), kept mass: ([\d.]+), policy steps: (\d+)", served("xshare").log
    )
    before, after, kept, steps = map(float, lines[0])
    assert 8 < after < before < 64
    assert 0.5 < kept < 1
    assert 0 < steps <= 9


@pytest.mark.parametrize(
    ("name", "release"),
    [("xshare", LATEST), ("four policies", LATEST), ("full budget", OLDEST)],
)
def test_the_plan_in_force_is_in_log_server_info_and_metrics(name, release, served):
    """The configuration itself stays in /server_info as it was given."""
    answers = served(name, release)
    flags = SERVERS[name]
    schedule = build_schedule(flags[1], json.loads(flags[3]), speculative=False)
    assert schedule is not None
    plan = describe(schedule, top_k=8)
    assert f"Expert policy xshare on {LAYERS} MoE layers: {json.dumps(plan)}" in answers.log
    assert answers.info["expert_policy_config"] == flags[3]
    assert answers.info["internal_states"][0]["expert_policy_config"] == plan
    assert answers.plans == [hash_plan(plan)]
