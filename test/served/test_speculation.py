"""EAGLE-3 with a policy: verification selects per request, drafts and prefill are left alone."""

import pytest

from served.answers import FULL, LAYERS, NEW_TOKENS, policy, read_lines
from served.eagle import CHAIN, DRAFT_TOKENS, TREES, eagle, select_again
from served.ranks import PER_REQUEST, keys_of
from served.release import both_releases
from sglang_xshare.stage.acceptance import FIRST, estimate

BY_LAYER = (
    {"policy": "moe-spec", "budget": 16},
    {"policy": "moe-spec", "budget": 8, "scope": "request"},
    {"policy": "oea", "k0": 3},
    {"policy": "lynx-lat", "retain": 12},
)
FLAGS = {
    "per request": ("--expert-policy", "xshare:k0=1,add_per_request=4"),
    "over the batch": ("--expert-policy", "xshare"),
    "four policies": policy(
        "moe-spec", budget=16, layers={str(layer): keys for layer, keys in enumerate(BY_LAYER) if layer}
    ),
}
WEIGHED = {"policy": "xshare", "k0": 1, "add": 8, "acceptance": 0.5, "warm_rows": 1}
RANKED = {"policy": "moe-spec", "budget": 12, "acceptance": 0.7}
START = 63 / 64
"""The estimate of a server that has counted nothing yet."""


def plan_of(name, call):
    """The plan of a server above in a recorded call."""
    mass = 0.85 if call["rows"] < 8 else 0.9 if call["rows"] < 16 else 0.93
    batch = {"policy": "xshare", "k0": 1, "mass": mass}
    return {"per request": PER_REQUEST, "over the batch": batch, "four policies": BY_LAYER[call["layer"]]}[name]


@pytest.fixture
def speculated(tiny_model, asked):
    """Call it with policy flags, and a draft's shape, for the answers of a server that speculates."""
    return lambda flags, shape=CHAIN, **how: asked(*eagle(tiny_model, shape), *flags, **how)


@pytest.mark.parametrize(
    "name", ["four policies", *(pytest.param(name, marks=pytest.mark.long) for name in list(FLAGS)[:2])]
)
def test_only_verification_selects_as_the_reference_and_is_counted_as_the_runner_received_it(name, speculated):
    """Prefill is routed as without a policy; a forward of the draft is no step."""
    answers = speculated(FLAGS[name])
    calls = answers.calls("TARGET_VERIFY")
    assert {call["rows"] for call in calls} >= {DRAFT_TOKENS, 16 * DRAFT_TOKENS}
    for call in calls:
        assert call["rows"] == call["requests"] * DRAFT_TOKENS
        assert call["active"] == select_again(call, plan_of(name, call), DRAFT_TOKENS)
        # Of few requests, both may select the same.
        if name == "per request" and call["requests"] > 8:
            assert call["active"] != select_again(call, PER_REQUEST, call["rows"]), "as one request"
    dropped = [sum(call["before"] - call["after"] for call in calls[layer::LAYERS]) for layer in range(LAYERS)]
    assert all(dropped) if name == "four policies" else any(dropped)
    assert {call["mode"] for call in answers.records} == {"EXTEND", "TARGET_VERIFY"}
    assert all(call["after"] == call["before"] for call in answers.calls("EXTEND"))
    outcomes = {name: count for name, count in answers.metrics.items() if name.startswith("steps ") and count}
    assert outcomes == {"steps policy": len(calls) / LAYERS, "steps prefill": answers.forwards("EXTEND")}
    assert answers.metrics["experts_before_total"] == sum(call["before"] for call in calls)
    assert answers.metrics["experts_after_total"] == sum(call["after"] for call in calls)
    traced = [(record["phase"], record["batch_size"], record["experts_after"]) for record in answers.trace]
    assert traced == [("verify", call["rows"], call["after"]) for call in calls]


@pytest.mark.long
def test_drafts_count_by_their_chance(speculated):
    answers = speculated(keys_of(WEIGHED | {"layers": {"1": RANKED, "2": {"acceptance": "auto"}}}))
    calls = answers.calls("TARGET_VERIFY")
    for call in calls:
        plan = RANKED if call["layer"] == 1 else WEIGHED
        assert call["layer"] == 2 or call["active"] == select_again(call, plan, DRAFT_TOKENS)
    estimated = [call for call in calls if call["layer"] == 2]
    for call, acceptance in ((estimated[0], START), (estimated[-1], answers.metrics["acceptance"])):
        assert call["active"] == select_again(call, {**WEIGHED, "acceptance": acceptance}, DRAFT_TOKENS)
    assert 0 < answers.metrics["acceptance"] < START
    weighed = [call for call in calls if call["layer"] in (0, 3)]
    alike = [select_again(call, {**WEIGHED, "acceptance": 1.0}, DRAFT_TOKENS) for call in weighed]
    assert [call["active"] for call in weighed] != alike


@pytest.mark.long
@both_releases
def test_drafts_count_by_what_was_accepted(release, tiny_model, small_server, prompts):
    plan = {"policy": "xshare", "k0": 1, "add": 4, "acceptance": "auto"}
    server, probe, _ = small_server(*eagle(tiny_model), *keys_of(plan), release=release)
    with server:
        told = server.get("/expert_policy")
        assert (told["acceptance"], told["estimated_acceptance"]) == ("auto", START)
        verified = drafts = checked = 0
        for turn in range(1, 5):
            seen, before = len(read_lines(probe)), told["estimated_acceptance"]
            answers = server.generate(prompts[turn::4], max_new_tokens=48, ignore_eos=True)
            told = server.get("/expert_policy")
            verified += sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
            drafts += sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)
            calls = [call for call in read_lines(probe)[seen:] if call["mode"] == "TARGET_VERIFY"]
            for call in calls if told["estimated_acceptance"] == before else ():
                assert call["active"] == select_again(call, plan | {"acceptance": before}, DRAFT_TOKENS)
                checked += 1
    assert checked
    number = told["estimated_acceptance"]
    # What was counted since the last power of two of forwards waits for the next.
    assert number == pytest.approx(estimate((3 * FIRST + drafts) / (FIRST + verified), DRAFT_TOKENS), abs=0.06)
    assert number < START


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
