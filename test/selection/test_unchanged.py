"""`bounds.can_change`: where it says no, the model's own routing comes out, whatever the logits."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from selection.cases import cases, check_unchanged, fill_logits, free_plans, keys_for, router_of
from selection.oracle import ALGORITHMS
from sglang_xshare import Router, build_plan, select
from sglang_xshare.policies import VANILLA, bounds

often = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def draw_case(data):
    """Of few rows, so that many a plan cannot change them, and of ranks that hold equally many experts."""
    case = data.draw(cases(max_requests=3, max_experts=32, max_tokens=3))
    return dataclasses.replace(case, rank_of_expert=[expert % 4 for expert in range(case.num_experts)])


def can_change(plan, case):
    slots = None if case.resident is None else case.slots
    sizes = case.num_experts, len(case.logits), case.tokens_per_request
    return bounds.can_change(plan, router_of(case), *sizes, ranks=4, slots=slots)


@pytest.mark.parametrize("policy", [policy for policy in ALGORITHMS if policy not in ("vanilla", "lynx-acc")])
@often
@given(data=st.data())
def test_a_published_plan(policy, data):
    case = draw_case(data)
    plan = build_plan(policy, **data.draw(keys_for(policy, case)))
    assume(not can_change(plan, case))
    check_unchanged(case, plan)


@often
@given(data=st.data())
def test_any_plan(data):
    case = draw_case(data)
    plan = data.draw(free_plans(case))
    assume(not can_change(plan, case))
    check_unchanged(case, plan)


@pytest.mark.parametrize("rows", range(1, 9))
def test_the_published_default_from_its_smallest_batch_on(rows):
    """24 experts hold all that rows of a top-4 model want beyond their first: up to 8 rows, not 9."""
    plan, router = build_plan("xshare", k0=1, add=24), Router(4)
    assert not bounds.can_change(plan, router, 128, rows)
    for seed in range(20):
        logits = fill_logits(("normal", "ties")[seed % 2], rows, 128, seed)
        out, vanilla = select(logits, plan, router), select(logits, VANILLA, router)
        assert torch.equal(out.topk_ids, vanilla.topk_ids)
        assert torch.equal(out.topk_weights, vanilla.topk_weights)
    assert bounds.can_change(plan, router, 128, 9)
    apart = torch.full((9, 128), -9.0)
    for row in range(9):
        apart[row, row * 4 : row * 4 + 4] = 1.0
    assert int(select(apart, plan, router).active.sum()) == 9 + 24


@pytest.mark.parametrize(
    ("keys", "can_change"),
    [
        ({"policy": "xshare", "k0": 1, "add": 21}, False),
        ({"policy": "xshare", "k0": 1, "add": 20}, True),
        ({"policy": "xshare", "k0": 1, "add": 21, "p": 0.5}, False),
        ({"policy": "xshare", "k0": 2, "add": 20, "p": 0.5}, True),
        ({"policy": "xshare", "k0": 1, "add": 21, "utility": "full"}, True),
        ({"policy": "xshare", "k0": 1, "add": 21, "utility": "squared"}, False),
        ({"policy": "xshare", "k0": 1, "add": 20, "utility": "squared"}, True),
        ({"policy": "xshare", "k0": 1, "add": 21, "own_share": 0.75}, False),
        ({"policy": "xshare", "k0": 1, "add": 20, "own_share": 0.75}, True),
        ({"policy": "oea", "k0": 8, "own_share": 1}, False),
        ({"policy": "xshare", "k0": 1, "mass": 1.0}, False),
        ({"policy": "xshare", "k0": 1, "mass": 1.0, "max_add": 21}, False),
        ({"policy": "xshare", "k0": 1, "mass": 1.0, "max_add": 20}, True),
        ({"policy": "xshare", "k0": 1, "add": 1, "mass": 1.0, "max_add": 20}, False),
        ({"policy": "xshare", "k0": 1, "mass": 0.99, "max_add": 21}, True),
        ({"policy": "custom", "k0": 1, "add": 21, "kmax": 9}, True),
        ({"policy": "custom", "k0": 1, "add": 21, "max_rank": 7}, True),
        ({"policy": "custom", "k0": 1, "add": 21, "max_rank": 8}, False),
        ({"policy": "custom", "k0": 1, "add": 21, "coverage": "truncate"}, False),
        ({"policy": "oea", "k0": 8}, False),
        ({"policy": "oea", "k0": 8, "kmax": 9}, True),
        ({"policy": "oea", "k0": 7}, True),
        ({"policy": "pruned", "k0": 8}, False),
        ({"policy": "pruned", "k0": 8, "p": 0.9}, True),
        ({"policy": "dynamic-skip", "beta": 0.1}, True),
        ({"policy": "dynamic-skip", "beta": 0}, False),
        ({"policy": "lynx-acc", "confidence": 0.1}, True),
        ({"policy": "lynx-lat", "retain": 24}, False),
        ({"policy": "lynx-lat", "retain": 23}, True),
        ({"policy": "moe-spec", "budget": 63}, True),
        ({"policy": "moe-spec", "budget": 64}, False),
        ({"policy": "moe-spec", "budget": 24, "utility": "squared"}, False),
        ({"policy": "moe-spec", "budget": 23, "utility": "squared"}, True),
        ({"policy": "custom", "budget": 24}, False),
        ({"policy": "custom", "budget": 23}, True),
        ({"policy": "moe-spec", "budget": 64, "ranking": "static", "order": list(range(64))}, False),
    ],
)
def test_three_rows_of_a_top_8_model(keys, can_change):
    assert bounds.can_change(build_plan(keys), Router(8), 64, 3) is can_change


def test_a_limited_reach_can_lose_what_a_group_has_a_share_for():
    """A group's best may lie far down the row's own ranking."""
    plan, router = build_plan("custom", k0=1, add=21, max_rank=8), Router(8, quota_groups=2)
    logits = torch.arange(64.0, 0, -1).repeat(3, 1)
    out = select(logits, plan, router)
    assert (out.topk_ids == -1).any()
    assert bounds.can_change(plan, router, 64, 3)
    assert bounds.can_change(build_plan("custom", k0=1, add=21), router, 64, 3) is False
    assert bounds.can_drop(build_plan("oea", k0=7, max_rank=8), router, 64)
