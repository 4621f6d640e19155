"""The real server, policy off and on: what it answers, and how many experts are active in its MoE runner."""

import re

import pytest

from served.answers import LAYERS, NEW_TOKENS, SERVERS
from served.release import both_releases, oldest_takes_long
from sglang_xshare.policies import list_policies


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


def test_policy_cuts_experts_in_decode_and_leaves_single_rows(served):
    calls = served("xshare").calls("DECODE", least=2)
    assert all(call["after"] <= call["rows"] + 8 for call in calls)
    assert sum(call["after"] for call in calls) < 0.8 * sum(call["before"] for call in calls)
    assert {call["after"] for call in served("xshare").calls("DECODE", most=1)} == {8}
    for name in ("xshare", "four policies"):
        first, second, _ = served(name).tokens
        assert first == second, "runs repeat"


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("four policies", {0: 16 + 4, 1: 16 * 3, 2: 16, 3: 12}),
        pytest.param("four more policies", {0: 12, 3: 10}, marks=pytest.mark.long),
    ],
)
def test_each_policy_keeps_its_budget(name, bounds, served):
    for layer, most in bounds.items():
        counts = [call["after"] for call in served(name).calls("DECODE", least=2) if call["layer"] == layer]
        assert max(counts) <= most
        assert min(counts) >= 8 or name == "four policies"
    for layer in range(LAYERS):
        calls = [call for call in served(name).calls("DECODE", least=2) if call["layer"] == layer]
        dropped = sum(call["before"] - call["after"] for call in calls)
        assert dropped > 0, f"layer {layer}"


def test_every_policy_is_served():
    """A new policy must join one of the servers above."""
    named = {"vanilla"}
    for flags in SERVERS.values():
        named |= {flags[1]} if flags else set()
        named |= set(re.findall(r'"policy": "([\w-]+)"', flags[3])) if len(flags) > 2 else set()
    assert named == {policy.name for policy in list_policies()}


@pytest.mark.long
def test_sizes_and_layers_are_honoured(served):
    """Of every decode step there was: a batch that was admitted in two groups has steps of other sizes too."""
    answers = served("sizes")
    steps = [call["rows"] for call in answers.calls("DECODE") if call["layer"] == 0]
    assert min(steps.count(size) for size in (2, 4, 8, 16)) >= NEW_TOKENS - 1
    selecting = [rows for rows in steps if 4 <= rows <= 8]
    assert answers.metrics["steps min_rows"] == sum(rows < 4 for rows in steps)
    assert answers.metrics["steps max_rows"] == sum(rows > 8 for rows in steps)
    assert answers.metrics["steps policy"] == len(selecting)
    traced = [(record["batch_size"], record["layer"]) for record in answers.trace]
    assert traced == [(rows, layer) for rows in selecting for layer in (0, 1, 3)]
    for call in answers.calls("DECODE"):
        if call["rows"] not in selecting or call["layer"] == 2:
            assert call["after"] == call["before"]
        else:
            assert call["after"] <= call["rows"] + (8 if call["rows"] < 6 else 0)
