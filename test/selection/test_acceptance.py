"""Rows of a verify step weighed by the chance that their draft is accepted: `acceptance`, `warm_rows`, `Batch.depth`.

That the backends agree is shown with all other keys, by the free plans of test_exactness.py, test_cpu_call.py and
test_triton_exact_rows.py; that `can_change` holds, by those of test_unchanged.py.
"""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selection.cases import cases, free_plans, indices, run
from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.policies import bounds
from sglang_xshare.policies.schedule import build_schedule

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
BACKENDS = ("reference", "torch", "cpu")
EXACT = ("topk_ids", "topk_weights", "selected", "active", "vanilla_active", "rescued", "kept_mass")


def rows_that_want(*experts, others=8):
    """Logits of rows that each want one expert, and no other nearly as much."""
    logits = torch.full((len(experts), others), -4.0) - torch.arange(others) / 64
    logits[torch.arange(len(experts)), list(experts)] = 4.0
    return logits


def find_selected(logits, batch, **keys):
    """S by every backend, which agree."""
    plan = build_plan("xshare", **keys)
    found = [indices(select(logits, plan, Router(2), batch, backend=backend).selected) for backend in BACKENDS]
    assert found[1:] == found[:-1]
    return found[0]


def test_a_draft_counts_by_the_chance_that_it_is_emitted():
    """Two late drafts outvote the first row while all count alike, and no more once half of each is accepted."""
    logits, batch = rows_that_want(0, 1, 5, 5), Batch(tokens_per_request=4)
    assert find_selected(logits, batch, k0=0, add=1) == {5}
    assert find_selected(logits, batch, k0=0, add=1, acceptance=0.5) == {0}
    # 1/4 + 1/8 against 1/2 of the second row
    assert find_selected(logits, batch, k0=0, add=2, acceptance=0.5) == {0, 1}
    assert find_selected(logits, batch, k0=0, add=2, acceptance=0.9) == {0, 5}


def test_a_tree_says_how_deep_its_drafts_are():
    """The same rows as siblings: all follow on the first alone."""
    logits = rows_that_want(0, 1, 5, 5)
    siblings = Batch(tokens_per_request=4, depth=torch.tensor([0, 1, 1, 1], dtype=torch.int32))
    assert find_selected(logits, siblings, k0=0, add=2, acceptance=0.6) == {0, 5}
    chain = Batch(tokens_per_request=4, depth=torch.tensor([0, 1, 2, 3], dtype=torch.int32))
    assert find_selected(logits, chain, k0=0, add=2, acceptance=0.6) == find_selected(
        logits, Batch(tokens_per_request=4), k0=0, add=2, acceptance=0.6
    )


def test_only_the_first_rows_bring_their_warm_up():
    logits, batch = rows_that_want(0, 1, 5, 6, 2, 3, 5, 6), Batch(tokens_per_request=4)
    assert find_selected(logits, batch, k0=1, add=0) == {0, 1, 2, 3, 5, 6}
    assert find_selected(logits, batch, k0=1, add=0, warm_rows=2) == {0, 1, 2, 3}
    assert find_selected(logits, batch, k0=1, add=0, warm_rows=1) == {0, 2}
    out = select(logits, build_plan("xshare", k0=1, add=0, warm_rows=1), Router(1), batch)
    assert set(out.topk_ids.flatten().tolist()) == {0, 2}, "the others take their best in S"


def test_a_request_adds_by_its_weighed_utility():
    logits, batch = rows_that_want(0, 1, 5, 5, 2, 3, 6, 6), Batch(tokens_per_request=4)
    assert find_selected(logits, batch, k0=0, add=0, add_per_request=1) == {5, 6}
    assert find_selected(logits, batch, k0=0, add=0, add_per_request=1, acceptance=0.5) == {0, 2}


def test_mass_is_a_share_of_the_weighed_total():
    logits, batch = rows_that_want(0, 1, 2, 3), Batch(tokens_per_request=4)
    assert len(find_selected(logits, batch, k0=0, mass=0.7)) == 3
    assert len(find_selected(logits, batch, k0=0, mass=0.7, acceptance=0.5)) == 2


def test_a_first_row_is_weighed_too():
    """By 1, as a float32: shares that it cannot tell apart are equal, on every backend."""
    logits = torch.full((2, 8), -30.0)
    logits[0, :2] = torch.tensor([2.0, 2.000002])
    plan = build_plan("custom", k0=0, add=1, utility="full", acceptance=1e-6)
    router, batch = Router(1, "sqrtsoftplus"), Batch(tokens_per_request=2)
    found = [select(logits, plan, router, batch, backend=backend).selected for backend in BACKENDS]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("backend", BACKENDS)
@few
@given(data=st.data())
def test_it_changes_nothing_outside_verification(backend, data):
    """A step of one row a request; and with every draft accepted and every row warm, any step."""
    case = data.draw(cases(max_tokens=4))
    plan = data.draw(free_plans(case))
    plain = dataclasses.replace(plan, acceptance=1.0, warm_rows=None)
    decode = dataclasses.replace(case, tokens_per_request=1, depth=None)
    all_warm = dataclasses.replace(plain, warm_rows=64 if plan.k0 else None)
    for step, weighed in ((decode, plan), (case, all_warm)):
        found, expected = run(step, weighed, backend), run(step, plain, backend)
        # Weights of a row whose first choice is sure are divided without a look at whether their sum is 0.
        for name in EXACT:
            assert torch.allclose(getattr(found, name), getattr(expected, name), rtol=1e-6, atol=0, equal_nan=True), (
                name
            )


@few
@given(data=st.data())
def test_neither_order_nor_depth_beyond_the_table_counts(data):
    """Requests in any order have the same S; all depths beyond the table count as its last."""
    case = data.draw(cases(max_tokens=4))
    plan = data.draw(free_plans(case))
    tokens, rows = case.tokens_per_request, len(case.logits)
    requests = torch.tensor(data.draw(st.permutations(range(rows // tokens))))
    order = (requests.unsqueeze(1) * tokens + torch.arange(tokens)).flatten()
    moved = {
        name: None if (value := getattr(case, name)) is None else value[order]
        for name in ("logits", "valid", "exact", "depth")
    }
    if plan.confidence is None:  # of voters as sure as each other the first rows vote
        expected, found = run(case, plan, "cpu"), run(dataclasses.replace(case, **moved), plan, "cpu")
        assert torch.equal(found.selected, expected.selected)
    for one, other in ((255, 10_000), (0, -7)):
        depths = [torch.full((rows,), depth, dtype=torch.int32) for depth in (one, other)]
        for backend in BACKENDS:
            first, second = (run(dataclasses.replace(case, depth=depth), plan, backend).selected for depth in depths)
            assert torch.equal(first, second)


def test_a_budget_that_may_lose_a_late_draft_can_change_a_step():
    enough = {"k0": 1, "add": 64}
    assert not bounds.can_change(build_plan("xshare", **enough), Router(2), 64, 8, 8)
    assert bounds.can_change(build_plan("xshare", **enough, acceptance=0.5), Router(2), 256, 8, 8)
    assert not bounds.can_change(build_plan("xshare", **enough, acceptance=0.5), Router(2), 64, 8, 1)
    late = build_plan("xshare", k0=0, add=8, acceptance=0.01)
    assert bounds.can_drop(late, Router(1), 8)
    drafts = rows_that_want(*range(8))
    assert select(drafts, late, Router(1), Batch(tokens_per_request=8)).active.sum() < 8
    # 8 rows of 2 experts: 7 are in no warm-up but the first row's one
    assert not bounds.can_change(build_plan("xshare", k0=1, add=15, warm_rows=1), Router(2), 64, 8, 8)
    assert bounds.can_change(build_plan("xshare", k0=1, add=14, warm_rows=1), Router(2), 64, 8, 8)


@pytest.mark.parametrize("keys", [{"acceptance": 0.5}, {"warm_rows": 1}])
def test_without_speculation_there_are_no_drafts(keys):
    name = next(iter(keys))
    with pytest.raises(ValueError, match=f"{name} = .*: must be used with speculative decoding"):
        build_schedule("xshare", {"k0": 1, "add": 8, **keys}, speculative=False)
    assert build_schedule("xshare", {"k0": 1, "add": 8, **keys}, speculative=True) is not None


@pytest.mark.parametrize("keys", [{"acceptance": 0.5}, {"k0": 1, "coverage": "own", "warm_rows": 1}])
def test_a_key_that_nothing_reads_is_refused(keys):
    with pytest.raises(ValueError, match="must be used with"):
        build_plan("custom", **keys)


def test_depths_are_checked():
    plan = build_plan("xshare", k0=1, add=1, acceptance=0.5)
    for depth in (torch.zeros(3, dtype=torch.int32), torch.zeros(4)):
        with pytest.raises(ValueError, match=r"depth .*: allowed is an int32 tensor \[4\]"):
            select(rows_that_want(0, 1, 2, 3), plan, Router(2), Batch(tokens_per_request=4, depth=depth))
