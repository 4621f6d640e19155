"""EAGLE-3 with a policy: verification selects per request, drafts and prefill are left alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from served.answers import LAYERS, NEW_TOKENS, Answers, policy
from served.eagle import CHAIN, DRAFT_TOKENS, TREES, eagle, select_again

BARE = ("--expert-policy", "xshare")
BY_REQUEST = ("--expert-policy", "xshare:k0=1,add_per_request=4")
FULL = policy("xshare", k0=1, add=64, utility="full")
PUBLISHED = {"policy": "xshare", "k0": 1, "add": 0, "add_per_request": 4}
BY_LAYER: tuple[dict[str, Any], ...] = (
    {"policy": "moe-spec", "budget": 16},
    {"policy": "moe-spec", "budget": 8, "scope": "request"},
    {"policy": "oea", "k0": 3},
    {"policy": "lynx-lat", "retain": 12},
)
FOUR = policy("moe-spec", budget=16, layers={str(layer): keys for layer, keys in enumerate(BY_LAYER) if layer})
WEIGHED = {"policy": "xshare", "k0": 1, "add": 8, "acceptance": 0.5, "warm_rows": 1}
RANKED = {"policy": "moe-spec", "budget": 12, "acceptance": 0.7}


@pytest.fixture
def speculated(tiny_model: Path, asked: Callable[..., Answers]) -> Callable[..., Answers]:
    """Call it with policy flags, and a draft's shape, for the answers of a server that speculates."""
    return lambda flags, shape=CHAIN, **how: asked(*eagle(tiny_model, shape), *flags, **how)


@pytest.mark.long
def test_xshare_verifies_as_published_and_per_request(speculated):
    calls = speculated(BY_REQUEST).calls("TARGET_VERIFY")
    assert {call["rows"] for call in calls} >= {DRAFT_TOKENS, 16 * DRAFT_TOKENS}
    assert all(call["rows"] == call["requests"] * DRAFT_TOKENS for call in calls)
    for call in calls:
        assert call["active"] == select_again(call, PUBLISHED, DRAFT_TOKENS)
    large = [call for call in calls if call["requests"] > 8]  # of few requests, both may select the same
    assert all(call["active"] != select_again(call, PUBLISHED, call["rows"]) for call in large), "not one request"
    assert sum(call["after"] for call in calls) < sum(call["before"] for call in calls)


@pytest.mark.long
def test_bare_xshare_verifies_over_the_batch(speculated):
    calls = speculated(BARE).calls("TARGET_VERIFY")
    assert calls
    for call in calls:
        mass = 0.85 if call["rows"] < 8 else 0.9 if call["rows"] < 16 else 0.93
        assert call["active"] == select_again(call, {"policy": "xshare", "k0": 1, "mass": mass}, DRAFT_TOKENS)


@pytest.mark.parametrize("flags", [pytest.param(BARE, marks=pytest.mark.long), FOUR], ids=["xshare", "four policies"])
def test_verify_is_counted_as_the_runner_received_it(flags, speculated):
    answers = speculated(flags)
    calls = answers.calls("TARGET_VERIFY")
    assert answers.metrics["steps policy"] == len(calls) / LAYERS > 0
    assert answers.metrics["steps prefill"] == answers.forwards("EXTEND")
    assert answers.metrics["experts_before_total"] == sum(call["before"] for call in calls)
    assert answers.metrics["experts_after_total"] == sum(call["after"] for call in calls)
    traced = [(record["phase"], record["batch_size"], record["experts_after"]) for record in answers.trace]
    assert traced == [("verify", call["rows"], call["after"]) for call in calls]


def test_each_policy_selects_at_verification(speculated):
    calls = speculated(FOUR).calls("TARGET_VERIFY")
    for call in calls:
        assert call["active"] == select_again(call, BY_LAYER[call["layer"]], DRAFT_TOKENS)
        most = (16, 8 * call["requests"], 3 * call["rows"], 12)[call["layer"]]
        assert 0 < call["after"] <= most
    for layer in range(LAYERS):
        dropped = sum(call["before"] - call["after"] for call in calls if call["layer"] == layer)
        assert dropped > 0, f"layer {layer}"


@pytest.mark.long
def test_drafts_count_by_their_chance(speculated):
    keys = {name: value for name, value in WEIGHED.items() if name != "policy"}
    answers = speculated(policy("xshare", **keys, layers={"1": RANKED, "2": {"acceptance": "auto"}}))
    calls = answers.calls("TARGET_VERIFY")
    for call in calls:
        plan = RANKED if call["layer"] == 1 else WEIGHED
        assert call["layer"] == 2 or call["active"] == select_again(call, plan, DRAFT_TOKENS)
    estimated = [call for call in calls if call["layer"] == 2]
    for call, acceptance in ((estimated[0], 63 / 64), (estimated[-1], answers.metrics["acceptance"])):
        assert call["active"] == select_again(call, {**WEIGHED, "acceptance": acceptance}, DRAFT_TOKENS)
    assert 0 < answers.metrics["acceptance"] < 63 / 64
    alike = [
        select_again(call, {**WEIGHED, "acceptance": 1.0}, DRAFT_TOKENS) for call in calls if call["layer"] in (0, 3)
    ]
    weighed = [call["active"] for call in calls if call["layer"] in (0, 3)]
    assert weighed != alike


def test_only_the_target_model_selects(speculated):
    """Prefill is routed as without a policy; a forward of the draft is no step."""
    answers = speculated(FOUR)
    assert {call["mode"] for call in answers.records} == {"EXTEND", "TARGET_VERIFY"}
    assert all(call["after"] == call["before"] for call in answers.calls("EXTEND"))
    outcomes = {name: count for name, count in answers.metrics.items() if name.startswith("steps ") and count}
    assert outcomes.keys() == {"steps policy", "steps prefill"}


@pytest.mark.parametrize("shape", [CHAIN, *(pytest.param(tree, marks=pytest.mark.long) for tree in TREES)])
def test_full_budget_answers_as_no_speculation(shape, speculated, served):
    answers = speculated(FULL, shape)
    assert answers.tokens == served("unpatched").tokens
    assert max(call["rows"] for call in answers.calls("TARGET_VERIFY")) == 16 * shape[2]


@pytest.mark.long
def test_off_answers_as_no_speculation_while_requests_come_and_go(speculated, served):
    answers = speculated((), staggered=True)
    assert answers.tokens == served("unpatched").tokens[:1]
    sizes = {call["requests"] for call in answers.calls("TARGET_VERIFY")}
    assert len(sizes) > 4, "the requests were staggered"
    assert not any(call["stage"] for call in answers.records)
    # At least two tokens a verify step; a request's first token is its prefill's.
    assert 16 * (NEW_TOKENS - 1) / answers.verified >= 2.0
