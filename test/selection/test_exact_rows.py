"""Rows that must be exact: what the model itself would give them, whatever a policy gives the others.

Answers are compared with vanilla's of the same backend to the last bit, those of the oracle in test_exactness.py; the
Triton kernel is compared with the reference in test_triton_exact_rows.py.
"""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selection.cases import cases, fill_logits, indices, run
from selection.draws import any_plans, marked, pad_columns
from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.policies import VANILLA
from sglang_xshare.selection.cpu_call import load

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
BOTH = ("reference", "torch")


def check_exact(case, plan, backend):
    """Ids, weights and kept mass of exact rows as vanilla has them, to the last bit, and their experts active."""
    out = run(case, plan, backend)
    vanilla = run(dataclasses.replace(case, exact=None), VANILLA, backend)
    columns = out.topk_ids.shape[1]
    rows = case.exact_rows
    assert torch.equal(out.topk_ids[rows], pad_columns(vanilla.topk_ids, columns, -1)[rows])
    assert torch.equal(out.topk_weights[rows], pad_columns(vanilla.topk_weights, columns, 0.0)[rows])
    assert torch.equal(out.kept_mass[rows], vanilla.kept_mass[rows])
    assert case.held() <= indices(out.active)
    assert torch.equal(out.vanilla_active, vanilla.vanilla_active)
    return out, vanilla


@few
@given(data=st.data())
def test_so_it_is_under_any_plan(data):
    """With more columns than the model's top-k, or fewer: then there are k, of which the others leave some empty."""
    case = data.draw(marked())
    plan = data.draw(any_plans(case))
    out, found = (check_exact(case, plan, backend)[0] for backend in BOTH)
    for name in ("topk_ids", "selected", "active", "rescued"):
        assert torch.equal(getattr(out, name), getattr(found, name)), name
    assert torch.allclose(out.topk_weights, found.topk_weights, rtol=0, atol=1e-6)
    assert out.topk_ids.shape[1] == max(plan.kmax or 0, case.top_k)
    others = (out.topk_ids >= 0).sum(1)[[i for i in case.rows if i not in case.exact_rows]]
    assert (others <= (plan.kmax or case.top_k)).all()


@few
@given(data=st.data())
def test_all_rows_exact_is_vanilla(data):
    """Of a static order the best are in S all the same, but no row has them."""
    case = data.draw(cases())
    plan = data.draw(any_plans(case))
    case = dataclasses.replace(case, exact=torch.ones(len(case.P), dtype=torch.bool))
    for backend in BOTH:
        out, vanilla = check_exact(case, plan, backend)
        assert torch.equal(out.active, vanilla.active)
        assert plan.ranking == "static" or torch.equal(out.selected, vanilla.active)
        assert torch.equal(out.kept_mass, vanilla.kept_mass)
        assert out.rescued == 0


@few
@given(data=st.data())
def test_padding_is_never_exact(data):
    case = data.draw(marked())
    valid = torch.arange(len(case.P)) % 3 != 1
    plan = data.draw(any_plans(case))
    marks = [case.exact & valid, case.exact | ~valid]
    for backend in BOTH:
        first, second = (run(dataclasses.replace(case, valid=valid, exact=exact), plan, backend) for exact in marks)
        for name in ("topk_ids", "topk_weights", "selected", "active", "vanilla_active", "kept_mass"):
            assert torch.equal(getattr(first, name), getattr(second, name)), (backend, name)
        assert (first.topk_ids[~valid] == -1).all()


@few
@given(data=st.data())
def test_no_row_exact_is_as_without(data):
    """To the last bit, but for the columns that an exact row would need."""
    case = data.draw(cases())
    plan = data.draw(any_plans(case))
    nobody = dataclasses.replace(case, exact=torch.zeros(len(case.P), dtype=torch.bool))
    for backend in BOTH:
        out, without = run(nobody, plan, backend), run(dataclasses.replace(case, exact=None), plan, backend)
        columns = out.topk_ids.shape[1]
        assert torch.equal(out.topk_ids, pad_columns(without.topk_ids, columns, -1))
        assert torch.equal(out.topk_weights, pad_columns(without.topk_weights, columns, 0.0))
        for name in ("selected", "active", "vanilla_active", "rescued"):
            assert torch.equal(getattr(out, name), getattr(without, name)), (backend, name)


@pytest.mark.parametrize("backend", BOTH)
def test_the_others_use_an_exact_rows_experts(backend):
    """Two rows of one top-2 model: the second has no expert of its own but its first, and takes the exact row's."""
    logits = torch.tensor([[9.0, 8.0, 0.0, 0.0, 0.0], [1.0, 2.0, 9.0, 8.0, 0.0]])
    plan = build_plan("xshare", k0=1, add=0)
    alone = select(logits, plan, Router(2), backend=backend)
    assert alone.topk_ids.tolist() == [[0, 2], [2, 0]]
    out = select(logits, plan, Router(2), Batch(exact=torch.tensor([True, False])), backend=backend)
    assert out.topk_ids.tolist() == [[0, 1], [2, 1]]
    assert indices(out.selected) == indices(out.active) == {0, 1, 2}


@pytest.mark.parametrize("backend", [*BOTH, *(["cpu"] if load() is not None else [])])
@pytest.mark.parametrize(
    ("policy", "keys"),
    [
        ("xshare", {"k0": 1, "target_per_rank": 2}),
        ("xshare", {"k0": 1, "target_per_rank": 1, "balance": "fill"}),
        ("custom", {"k0": 0, "budget": 4}),
        ("lynx-lat", {"retain": 4}),
    ],
)
def test_a_budget_counts_the_experts_of_others_alone(policy, keys, backend):
    """The first of four rows of a top-2 model is exact and holds 0 and 4, one of each rank. The others' best are 1, 2
    and 3, their next 4, which is there and has two votes, and 6.
    """
    logits = torch.zeros(4, 8)
    for row, (first, second) in enumerate([(0, 4), (1, 4), (2, 4), (3, 6)]):
        logits[row, first], logits[row, second] = 9.0, 8.0
    batch, ranks = Batch(exact=torch.arange(4) == 0), torch.arange(8) // 4
    out = select(logits, build_plan(policy, **keys), Router(2), batch, ranks, backend)
    assert indices(out.selected) == {0, 1, 2, 3, 4, 6}


def test_rows_that_cannot_be_marked_by_a_case_still_are():
    """The drawn cases would pass where `exact` went unread, were none of their rows changed by a policy."""
    logits = fill_logits("normal", 8, 32, seed=1)
    plan, exact = build_plan("xshare", k0=1, add=2), torch.arange(8) < 3
    with_it, without = (select(logits, plan, Router(4), Batch(exact=mark)) for mark in (exact, None))
    vanilla = select(logits, VANILLA, Router(4))
    assert torch.equal(with_it.topk_ids[:3], vanilla.topk_ids[:3])
    assert (without.topk_ids[:3] != vanilla.topk_ids[:3]).any(1).all()
    assert (with_it.topk_ids[3:] != vanilla.topk_ids[3:]).any()
