"""Experts that are loaded already: what a plan gains of them, and that it fits the slots they are paged into.

Answers are compared with the oracle's in test_exactness.py; the Triton kernel is compared with the reference here.
"""

import dataclasses
import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from selection.cases import cases, check_unchanged, indices, keys_for, router_of, run
from selection.compared import DEVICE, RESIDENT_PLANS, compare, few, kernel, make_logits, make_router, on_device
from selection.oracle import ALGORITHMS
from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.policies import bounds
from sglang_xshare.selection.triton_kernel import supports

__all__ = ["kernel"]
often = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FIELDS = ("topk_ids", "topk_weights", "selected", "active", "vanilla_active", "rescued")


@st.composite
def paged(draw, bounded=None, **sizes):
    """A case whose batch says which experts are resident, of slots or of none."""
    case = draw(cases(**sizes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    resident = torch.rand(case.num_experts, generator=generator) < draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    slots = st.integers(1, case.num_experts)
    slots = {None: st.one_of(st.none(), slots), True: slots, False: st.none()}[bounded]
    return dataclasses.replace(case, resident=resident, slots=draw(slots))


@st.composite
def adding_plans(draw, case, **keys):
    """Of warm-up and the batch's additions, as served."""
    k0 = draw(st.integers(0, case.top_k))
    utility = draw(st.sampled_from(["topk", "squared", "full"]))
    return build_plan("xshare", **{"k0": k0, "add": draw(st.integers(0, 9)), "utility": utility, **keys})


@often
@given(data=st.data())
def test_all_resident_is_vanilla_where_all_fit(data):
    """But for experts without any utility, as in test_unchanged.py."""
    case = data.draw(cases())
    slots = data.draw(st.sampled_from([None, case.num_experts]))
    case = dataclasses.replace(case, resident=torch.ones(case.num_experts, dtype=torch.bool), slots=slots)
    check_unchanged(case, data.draw(adding_plans(case)))


@often
@given(data=st.data())
def test_s_never_exceeds_the_slots(data):
    """But by what rows and requests bring themselves, which the plan's bound says beforehand."""
    case = data.draw(paged(bounded=True))
    policy = data.draw(st.sampled_from(["xshare", "oea"]))
    plan = build_plan(policy, **{**data.draw(keys_for(policy, case)), "free_residents": True})
    out = run(case, plan, "torch")
    sure = len(case.held()) + len(case.others) * plan.k0
    sure += len(case.requests()) * plan.add_per_request
    assert len(indices(out.selected)) <= max(case.slots, sure)
    exact_rows = 0 if case.exact is None else int(case.exact.sum())
    sizes = case.num_experts, len(case.P), case.tokens_per_request, exact_rows, case.slots
    bound = bounds.max_active(plan, router_of(case), *sizes)
    assert int(out.active.sum()) <= bound
    warm = {j for i in case.others for j in case.top[i][: plan.k0]} | case.held()
    assert warm <= indices(out.selected) or plan.p < 1


@pytest.mark.parametrize(
    ("keys", "exact_rows", "slots", "bound"),
    [
        ({"policy": "xshare", "k0": 1, "add": 4}, 0, 32, 32),
        ({"policy": "xshare", "k0": 1, "mass": 0.9}, 0, 32, 32),
        ({"policy": "xshare", "k0": 1, "mass": 0.9, "max_add": 4, "free_residents": False}, 0, 32, 20),
        ({"policy": "xshare", "k0": 3, "add": 0}, 0, 32, 48),
        ({"policy": "xshare", "k0": 1, "add_per_request": 6}, 0, 32, 16 + 4 * 6),
        ({"policy": "xshare", "k0": 1, "add": 4}, 2, 32, 32),
        ({"policy": "xshare", "k0": 1, "add": 4}, 4, 32, 4 * 8 + 12),
        ({"policy": "custom", "k0": 0, "add": 9, "coverage": "truncate"}, 0, 32, 32 + 16),
        ({"policy": "xshare", "k0": 1, "add": 4, "free_residents": False}, 0, 32, 20),
        ({"policy": "xshare", "k0": 3, "add": 4, "free_residents": False}, 0, 32, 52),
        ({"policy": "moe-spec", "budget": 40}, 0, 32, 40),
    ],
)
def test_bounds(keys, exact_rows, slots, bound):
    """Of 16 rows of a top-8 model: the slots, or what rows and requests alone may bring."""
    assert bounds.max_active(build_plan(keys), Router(8), 128, 16, 4, exact_rows, slots) == bound


@pytest.mark.parametrize(("slots", "can_change"), [(None, False), (32, False), (23, True)])
def test_a_batch_that_does_not_fit_can_change(slots, can_change):
    assert bounds.can_change(build_plan("xshare", k0=1, add=24), Router(8), 64, 3, slots=slots) is can_change
    assert not bounds.can_change(
        build_plan("xshare", k0=1, add=24, free_residents=False), Router(8), 64, 3, slots=slots
    )


@often
@given(data=st.data())
def test_residents_change_nothing_where_no_batch_names_them_or_the_plan_takes_none(data):
    case = data.draw(paged())
    policy = data.draw(st.sampled_from(list(ALGORITHMS)))
    keys = data.draw(keys_for(policy, case))
    without = dataclasses.replace(case, resident=None)
    runs = [run(without, build_plan(policy, **keys), "torch")]
    if policy in ("xshare", "oea"):
        runs += [run(without, build_plan(policy, **{**keys, "free_residents": free}), "torch") for free in (True, None)]
        keys = {**keys, "free_residents": False}
    runs.append(run(case, build_plan(policy, **keys), "torch"))
    for out in runs[1:]:
        for name in FIELDS:
            assert torch.equal(getattr(out, name), getattr(runs[0], name)), name


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_small_batch(backend):
    """Three are wanted beside 0 and 1, most the resident 2; the budget pays 3, which goes before 2 in three slots."""
    logits = torch.tensor([[9.0, 0, 8.0, 7.0, 0, 0], [0, 9.0, 8.0, 0, 0, 6.0]])
    resident = torch.tensor([False, False, True, False, True, False])
    plan = build_plan("xshare", k0=1, add=1)

    def selected(**batch):
        return indices(select(logits, plan, Router(3), Batch(**batch), backend=backend).selected)

    assert selected() == {0, 1, 2}
    assert selected(resident=resident) == {0, 1, 2, 3}
    assert selected(resident=resident, slots=4) == {0, 1, 2, 3}
    assert selected(resident=resident, slots=3) == {0, 1, 3}
    assert selected(resident=resident, slots=2) == {0, 1}
    assert selected(resident=resident, slots=1) == {0, 1}
    assert selected(resident=resident, slots=2, exact=torch.tensor([True, False])) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Batch(slots=0), "slots = 0:"),
        (
            lambda: select(
                torch.zeros(2, 8), build_plan("xshare"), Router(2), Batch(resident=torch.ones(2, dtype=torch.bool))
            ),
            "resident bool [2]:",
        ),
        (lambda: build_plan("xshare", free_residents=1), "free_residents = 1:"),
        (lambda: build_plan("custom", budget=8, free_residents=True), "free_residents = true:"),
        (lambda: build_plan("custom", k0=1, coverage="own", free_residents=True), "free_residents = true:"),
    ],
)
def test_bad_input_is_one_clear_line(make, line):
    with pytest.raises(ValueError, match=f"^{re.escape(line)} "):
        make()


# The Triton kernel.


@few
@given(data=st.data())
def test_random_cases(kernel, data):
    case = data.draw(paged(max_experts=128))
    policy = data.draw(st.sampled_from(["xshare", "oea", "lynx-lat"]))
    plan = build_plan(policy, **data.draw(keys_for(policy, case)))
    logits, router, batch, ranks = on_device(case)
    if len(logits) and supports(plan, router, batch, *logits.shape):
        compare(kernel, logits, plan, router, batch, ranks)


@pytest.mark.parametrize("slots", [None, 30, 12])
@pytest.mark.parametrize("name", RESIDENT_PLANS)
@pytest.mark.parametrize(("rows", "experts"), [(6, 40), (40, 64)])
def test_the_kernel_takes_residents(kernel, name, rows, experts, slots):
    """In one program and in several, beside padding and exact rows, with slots for all that would join and for few."""
    row, expert = torch.arange(rows, device=DEVICE), torch.arange(experts, device=DEVICE)
    plan = build_plan("custom", **RESIDENT_PLANS[name])
    for exact in (None, row % 6 == 1):
        batch = Batch(row % 5 != 3, 2, exact, expert % 3 != 1, slots)
        compare(kernel, make_logits("ties", rows, experts, rows), plan, Router(6), batch)


@pytest.mark.parametrize("kind", ["softmax with bias", "sigmoid", "group-limited", "top-k of each group"])
def test_routers(kernel, kind):
    expert = torch.arange(64, device=DEVICE)
    batch = Batch(resident=expert % 2 == 0, slots=24)
    compare(kernel, make_logits("normal", 12, 64), build_plan("xshare", k0=1, add=4), make_router(kind, 64), batch)
