"""The warnings of `check` about draft tokens that cannot pay."""

from dataclasses import fields

import pytest

from check.asking import H100, QWEN
from sglang_xshare import hooks
from sglang_xshare.check.drafts import CHANCE, describe, expect, list_warnings
from sglang_xshare.check.estimate import Step
from sglang_xshare.check.server import ServerFlags, read_flags
from sglang_xshare.check.weights import read_weights


def test_a_chain_gives_each_draft_s_chance_and_one():
    assert expect(1) == 1
    assert expect(3) == pytest.approx(1 + CHANCE + CHANCE**2)


def test_drafts_that_cost_more_than_they_give_are_named_with_the_number_that_gives_most():
    line = describe({1: 10e-3, 2: 12e-3, 4: 40e-3}, batch=8)
    assert line == (
        "--speculative-num-draft-tokens 4 cannot pay with --batch 8 by this estimate: a step takes 40.0 ms for 2.7 "
        "tokens a request (without drafts: 10.0 ms for 1) if a draft is accepted with chance 0.75; 2 would give the "
        "most tokens per second"
    )
    assert "; no drafts at all would give the most" in (describe({1: 10e-3, 2: 19e-3, 4: 40e-3}, batch=8) or "")
    assert describe({1: 10e-3, 2: 12e-3, 4: 20e-3}, batch=8) is None


def test_the_estimate_decides(write):
    """Qwen3-30B-A3B on an H100, where one draft token costs few weights, and at a tenth of the H100's bandwidth."""
    weights = read_weights(write(QWEN))

    def ask(tokens: int, policy: str | None = None, bandwidth: float = H100, more: tuple[str, ...] = ()) -> list[str]:
        flags = read_flags(["--model", "x", "--speculative-num-draft-tokens", str(tokens), *more])
        step = Step(weights, flags, batch=1, context=1024)
        schedule = None if policy is None else step.read_policy("--expert-policy", policy, {})
        return list_warnings(step, schedule, bandwidth / 1e9)

    assert ask(1) == ask(2) == []
    (line,) = ask(48, bandwidth=H100 / 10)
    assert line.startswith("--speculative-num-draft-tokens 48 cannot pay with --batch 1")
    selected = ask(48, "xshare:k0=1,add_per_request=1", H100 / 10)
    assert selected != [line], "a policy has fewer experts active"
    assert ask(48, bandwidth=H100 / 10, more=("--speculative-adaptive",)) == [], "the server adapts the number"


def test_the_flags_of_a_server_are_those_of_the_package():
    own = {name for name in hooks.FLAGS if name.startswith("expert_policy") or name == "mask_padding_experts"}
    assert own <= {one.name for one in fields(ServerFlags)}
    assert read_flags(["--model", "x", "--expert-policy-draft-depth", "throughput"]).names_policy
