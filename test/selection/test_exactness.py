"""Every policy on every backend against the oracle: random, tied, padded, tiny, huge and non-finite.

Covered: n 1..300, N 8..512, k 1..16, softmax, sigmoid, bias, group limits, requests of 1..64 tokens, padding rows
anywhere, three dtypes, and each policy's keys over their whole range.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selection.cases import SPECIAL, cases, free_plans, keys_for, run
from selection.expected import check
from selection.oracle import ALGORITHMS
from selection.oracle_case import Case
from sglang_xshare.policies import list_policies
from sglang_xshare.types import SCORINGS

EVERY_POLICY = pytest.mark.parametrize("policy", ALGORITHMS)
few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
many = settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check_random(policy, data, **sizes):
    case = data.draw(cases(**sizes))
    check(case, policy, data.draw(keys_for(policy, case)))


@EVERY_POLICY
@few
@given(data=st.data())
def test_small_batches(policy, data):
    check_random(policy, data)


@EVERY_POLICY
@settings(few, max_examples=8)
@given(data=st.data())
def test_large_batches(policy, data):
    check_random(policy, data, max_requests=30, max_experts=512, max_tokens=10)


def test_every_policy_of_a_paper_has_a_transcription():
    assert {policy.name for policy in list_policies()} - {"custom", "observe"} == set(ALGORITHMS)


@few
@given(data=st.data())
def test_free_plans(data):
    """No paper has them: the backends agree with the reference."""
    case = data.draw(cases())
    plan = data.draw(free_plans(case))
    expected, out = run(case, plan, "reference"), run(case, plan, "torch")
    for name in ("topk_ids", "selected", "active", "vanilla_active", "rescued"):
        assert torch.equal(getattr(out, name), getattr(expected, name)), name
    assert torch.allclose(out.topk_weights, expected.topk_weights, rtol=0, atol=1e-6)


@EVERY_POLICY
@few
@given(data=st.data())
def test_special_values(policy, data):
    """Every element drawn by itself, so that a failure shrinks to the few that matter."""
    rows = data.draw(st.integers(1, 4))
    values = st.lists(st.sampled_from(SPECIAL), min_size=8, max_size=8)
    case = Case(
        torch.tensor([data.draw(values) for _ in range(rows)]),
        top_k=data.draw(st.integers(1, 4)),
        scoring=data.draw(st.sampled_from(SCORINGS)),
        bias=data.draw(st.sampled_from([None, torch.tensor([0.0, 0.5] * 4)])),
        renormalize=data.draw(st.booleans()),
        valid=data.draw(st.sampled_from([None, torch.arange(rows) != 1])),
        rank_of_expert=[0, 1, 2, 3] * 2,
    )
    check(case, policy, data.draw(keys_for(policy, case)))


@pytest.mark.long
@EVERY_POLICY
@many
@given(data=st.data())
def test_many_small_batches(policy, data):
    check_random(policy, data, max_experts=128)


@pytest.mark.long
@EVERY_POLICY
@settings(many, max_examples=80)
@given(data=st.data())
def test_many_large_batches(policy, data):
    check_random(policy, data, max_requests=4, max_experts=512, max_tokens=64)
