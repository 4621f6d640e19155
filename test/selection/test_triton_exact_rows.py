"""Exact rows in the Triton kernel: against the reference, and to the last bit against the kernel's own vanilla."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from selection.cases import DTYPES, KINDS
from selection.compared import (
    DEVICE,
    EVERY_PLAN,
    compare,
    few,
    kernel,
    make_logits,
    make_plan,
    make_ranks,
    make_router,
    on_device,
)
from selection.draws import any_plans, marked, pad_columns
from sglang_xshare import Batch, Router, RunnerSlots, build_plan, select
from sglang_xshare.policies import VANILLA
from sglang_xshare.selection.triton_kernel import supports

__all__ = ["kernel"]
FIELDS = ("topk_ids", "selected", "active", "vanilla_active")


def mark(rows, every=3):
    """(valid, exact) [rows]: some padding, and of every few rows one exact, padding among them."""
    row = torch.arange(rows, device=DEVICE)
    return row % 5 != 3, row % every == 0


def check_exact(kernel, logits, plan, router, batch, ranks=None):
    """As the reference has it; and exact rows' ids, weights and kept mass are the kernel's vanilla's."""
    found = compare(kernel, logits, plan, router, batch, ranks)
    vanilla = kernel(logits, VANILLA, router, dataclasses.replace(batch, exact=None))
    rows = batch.exact if batch.valid is None else batch.exact & batch.valid
    columns = found.topk_ids.shape[1]
    assert torch.equal(found.topk_ids[rows], pad_columns(vanilla.topk_ids, columns, -1)[rows])
    assert torch.equal(found.topk_weights[rows], pad_columns(vanilla.topk_weights, columns, 0.0)[rows])
    assert torch.equal(found.kept_mass[rows], vanilla.kept_mass[rows])
    assert torch.equal(found.vanilla_active, vanilla.vanilla_active)
    return found


@few
@given(data=st.data())
def test_random_cases(kernel, data):
    case = dataclasses.replace(data.draw(marked(max_experts=128)), resident=None, slots=None)
    plan = data.draw(any_plans(case))
    logits, router, batch, ranks = on_device(case)
    if len(logits) and supports(plan, router, batch, *logits.shape):
        check_exact(kernel, logits, plan, router, batch, ranks)


@EVERY_PLAN
@pytest.mark.parametrize(("rows", "experts", "every"), [(5, 40, 2), (16, 128, 5), (20, 160, 3)])
def test_shapes(kernel, name, rows, experts, every):
    """One program and several."""
    valid, exact = mark(rows, every)
    check_exact(kernel, make_logits("normal", rows, experts, rows), make_plan(name), Router(6), Batch(valid, 1, exact))


@EVERY_PLAN
def test_all_rows_exact_is_vanilla(kernel, name):
    valid, _ = mark(40)
    logits = make_logits("normal", 40, 64)
    found = check_exact(kernel, logits, make_plan(name), Router(6), Batch(valid, 1, torch.ones_like(valid)))
    assert torch.equal(found.selected, found.vanilla_active)
    assert torch.equal(found.active, found.vanilla_active)


@pytest.mark.parametrize(
    "kind", ["softmax", "softmax, not renormalizing", "softmax with bias", "group-limited with bias"]
)
@pytest.mark.parametrize("name", ["xshare by mass", "moe-spec", "oea by level rank", "xshare of squares"])
def test_routers(kernel, kind, name):
    """Of a softmax the plan's own steps may need P itself, where the model's weights come of its multiple."""
    plan = make_plan(name)
    if plan.own_share and "not" in kind:
        plan = dataclasses.replace(plan, own_share=0.0)
    valid, exact = mark(12)
    check_exact(kernel, make_logits("normal", 12, 64), plan, make_router(kind, 64), Batch(valid, 1, exact))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "normal"])
@pytest.mark.parametrize("name", ["xshare", "lynx-lat", "moe-spec truncating"])
def test_ties_and_what_is_not_finite(kernel, name, kind, dtype):
    valid, exact = mark(9)
    check_exact(kernel, make_logits(kind, 9, 32, dtype=dtype), make_plan(name), Router(4), Batch(valid, 1, exact))


@pytest.mark.parametrize("keys", [{"add": 5}, {"budget": 9}, {"drop": 9, "ranking": "votes"}, {"target_per_rank": 3}])
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        *((7, width) for width in ({"kmax": 2, "max_rank": 3}, {"kmax": 2}, {"kmax": 7}, {"coverage": "truncate"})),
        *((40, width) for width in ({"kmax": 2, "max_rank": 3}, {"coverage": "truncate"})),
    ],
)
def test_columns(kernel, rows, keys, width):
    """Of rows of the policy's width: an exact row takes the model's top-k all the same."""
    valid, exact = mark(rows)
    plan = build_plan("custom", k0=1, **keys, **width)
    found = check_exact(kernel, make_logits("normal", rows, 64), plan, Router(4), Batch(valid, 1, exact))
    assert found.topk_ids.shape[1] == max(4, plan.kmax or 4)


@pytest.mark.parametrize("tokens", [2, 3, 8])
def test_requests(kernel, tokens):
    """Whole requests, and single rows of them."""
    rows = 5 * tokens
    row = torch.arange(rows, device=DEVICE)
    plan = build_plan("xshare", k0=1, add=5, add_per_request=3)
    for exact in (row // tokens % 2 == 0, row % 7 == 1):
        check_exact(kernel, make_logits("ties", rows, 48), plan, Router(6), Batch(row % 7 != 5, tokens, exact))


@pytest.mark.parametrize("slots", [RunnerSlots(), RunnerSlots(shared=1), RunnerSlots(masked=True)])
@pytest.mark.parametrize("keys", [{"k0": 1, "add": 3}, {"budget": 3, "ranking": "votes"}, {"k0": 1, "kmax": 2}])
@pytest.mark.parametrize("rows", [6, 40])
def test_slots_as_runners_take_them(kernel, rows, keys, slots):
    """Filled, beside a shared expert, and as masked logits."""
    plan, (valid, exact) = build_plan("custom", **keys), mark(rows)
    if plan.kmax and slots.masked:
        return
    call = make_logits("normal", rows, 24), plan, Router(4), Batch(valid, 1, exact), make_ranks(24)
    expected = select(*call, backend="reference", slots=slots)
    found = kernel(*call, slots=slots)
    for name in FIELDS:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.topk_weights, expected.topk_weights, atol=1e-6, rtol=2e-6)
    if slots.masked:
        assert torch.equal(found.masked_logits, expected.masked_logits)


def test_a_narrow_plan_fills_with_an_expert_that_is_used(kernel):
    """The second row has 7 in its top-k and in S, but a slot for 0 alone: padding gets the exact row's 2."""
    logits = torch.zeros(3, 8, device=DEVICE)
    logits[0, [1, 2]], logits[1, [0, 7]] = torch.tensor([[9.0, 8.0]] * 2, device=DEVICE)
    row = torch.arange(3, device=DEVICE)
    call = logits, build_plan("custom", k0=1, kmax=1, add=1), Router(2), Batch(row < 2, 1, row == 0)
    found = kernel(*call, slots=RunnerSlots())
    assert torch.equal(found.topk_ids, select(*call, backend="reference", slots=RunnerSlots()).topk_ids)
    assert found.selected[7]
    assert found.topk_ids.tolist() == [[1, 2], [0, 0], [2, 2]]
