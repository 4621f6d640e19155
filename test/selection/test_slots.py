"""Slots as MoE runners take them: none empty, no expert more active."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selection.cases import cases, keys_for, router_of, run
from selection.compared import (
    DEVICE,
    compare,
    few,
    kernel,
    make_logits,
    make_plan,
    make_ranks,
    make_router,
    on_device,
)
from selection.oracle import ALGORITHMS
from sglang_xshare import Batch, Router, RunnerSlots, build_plan, select
from sglang_xshare.policies import bounds
from sglang_xshare.selection.slots import drop_slots, fill_slots, find_filler, refill_slots
from sglang_xshare.selection.triton_kernel import supports
from sglang_xshare.selection.triton_kernel.tile import make_tile

__all__ = ["kernel"]
BACKENDS = ("reference", "torch", "triton")


@pytest.mark.parametrize(
    ("ids", "filler", "filled"),
    [
        ([[3, 1], [2, 0]], 0, [[3, 1], [2, 0]]),
        ([[3, -1, -1], [0, 5, -1]], 0, [[3, 3, 3], [0, 5, 0]]),
        ([[-1, -1], [2, 6], [4, -1]], 6, [[6, 6], [2, 6], [4, 4]]),
        ([[1, 2, 3, 4, -1], [5, 6, -1, -1, -1]], 0, [[1, 2, 3, 4, 1], [5, 6, 5, 5, 5]]),
    ],
    ids=["full rows", "the row's own first expert", "of padding the one that fills", "a plan's kmax"],
)
def test_what_fills_an_empty_slot(ids, filler, filled):
    found = fill_slots(torch.tensor(ids, dtype=torch.int32), torch.tensor(filler, dtype=torch.int32))
    assert found.dtype == torch.int32
    assert found.tolist() == filled


@pytest.mark.parametrize(
    ("selected", "vanilla_active", "active", "filler"),
    [
        ([2, 5, 6], [1, 2, 5], [2, 5, 6], 5),
        ([2, 5, 6], [1, 2, 5], [2, 6], 2),
        ([5, 6], [1, 2], [1, 2], 2),
        ([5], [], [], 0),
        ([0], [0], [0], 0),
    ],
    ids=["the largest of S and of a top-k", "that a row uses", "that a row uses at all", "no live row", "the first"],
)
def test_which_expert_fills(selected, vanilla_active, active, filler):
    tables = torch.zeros(3, 7, dtype=torch.bool)
    for table, experts in zip(tables, (selected, vanilla_active, active), strict=True):
        table[experts] = True
    assert find_filler(*tables).tolist() == filler


def test_slots_of_weight_0_are_dropped():
    ids = torch.tensor([[3, 1, 3], [2, 2, 2], [7, 4, 7]], dtype=torch.int32)
    weights = torch.tensor([[0.6, 0.4, 0.0], [0.0, -0.0, 0.0], [torch.nan, 1e-45, 0.0]])
    dropped = drop_slots(ids, weights)
    assert dropped.dtype == torch.int32
    assert dropped.tolist() == [[3, 1, -1], [-1, -1, -1], [7, 4, -1]]


def test_slots_are_filled_anew_from_places_in_use():
    """Row 1 has no expert of its own; what it was filled with has become place 9, which no other row uses."""
    ids = torch.tensor([[3, 1, 3], [9, 9, 9], [5, 5, 6]], dtype=torch.int32)
    weights = torch.tensor([[0.6, 0.4, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert refill_slots(ids, weights).tolist() == [[3, 1, 3], [6, 6, 6], [6, 6, 6]]
    assert refill_slots(ids, weights * 0).tolist() == [[0] * 3] * 3, "as when a graph is captured"
    assert refill_slots(ids[:0], weights[:0]).shape == (0, 3)
    ids[1] = -1  # of a row that upstream takes for padding
    assert refill_slots(ids, weights)[1].tolist() == [6, 6, 6]


def compare_filled(kernel, logits, plan, router, batch):
    """The kernel's answer for a runner, after comparing it with the reference's and with the unfilled one."""
    slots = RunnerSlots()
    ranks = make_ranks(logits.shape[1])
    bare = compare(kernel, logits, plan, router, batch)
    expected = select(logits, plan, router, batch, ranks, backend="reference", slots=slots)
    found = kernel(logits, plan, router, batch, ranks, slots=slots)
    assert torch.equal(found.topk_ids, expected.topk_ids)
    assert torch.equal(found.topk_weights, bare.topk_weights)
    assert torch.equal(found.active, bare.active)
    assert (found.topk_ids >= 0).all()
    return found


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("name", ["xshare", "dynamic-skip", "moe-spec truncating"])
def test_select_fills_what_it_leaves_empty(backend, name):
    logits, valid = make_logits("normal", 7, 24).cpu(), torch.arange(7) % 3 != 1
    bare = select(logits, make_plan(name), Router(4), Batch(valid), backend=backend)
    found = select(logits, make_plan(name), Router(4), Batch(valid), backend=backend, slots=RunnerSlots())
    assert (bare.topk_ids < 0).any()
    filler = find_filler(bare.selected, bare.vanilla_active, bare.active)
    assert bare.active[filler]
    assert torch.equal(found.topk_ids, fill_slots(bare.topk_ids, filler))
    assert torch.equal(found.topk_weights, bare.topk_weights)
    assert torch.equal(found.active, bare.active)


@pytest.mark.parametrize("name", ["xshare", "oea", "dynamic-skip", "moe-spec truncating", "lynx-lat"])
@pytest.mark.parametrize(
    ("rows", "experts"), [(1, 16), (5, 40), (16, 128), (20, 160), pytest.param(64, 64, marks=pytest.mark.long)]
)
def test_the_kernel_fills(kernel, name, rows, experts):
    """In one program and in several, where a padding row's expert is another program's."""
    valid = torch.arange(rows, device=DEVICE) % 5 != 3
    logits = make_logits("normal", rows, experts, seed=rows)
    compare_filled(kernel, logits, make_plan(name), Router(6), Batch(valid))


@pytest.mark.parametrize("live", [0, 1, 40])
def test_padding_of_whole_programs(kernel, live):
    """Rows of programs without a live one, and a batch without any, as when a graph is captured."""
    logits = make_logits("normal", 40, 128)
    valid = torch.arange(40, device=DEVICE) >= 40 - live
    assert make_tile(make_plan("xshare"), Router(8), Batch(), 40, 128).several
    found = compare_filled(kernel, logits, make_plan("xshare"), Router(8), Batch(valid))
    if not live:
        assert (found.topk_ids == 0).all()


def test_requests_and_more_columns_than_top_k(kernel):
    """A tile in which the rows of three-token requests are padded to four."""
    plan = build_plan("custom", k0=1, add_per_request=3, kmax=5)
    logits = make_logits("normal", 12, 40)
    compare_filled(kernel, logits, plan, Router(3), Batch(tokens_per_request=3))


@pytest.mark.parametrize("policy", ALGORITHMS)
@settings(few, max_examples=4)
@given(data=st.data())
def test_random_batches(kernel, policy, data):
    case = dataclasses.replace(data.draw(cases(max_experts=64)), exact=None, resident=None, slots=None)
    plan = build_plan(policy, **data.draw(keys_for(policy, case)))
    logits, router, batch, _ = on_device(case)
    if len(logits) and supports(plan, router, batch, *logits.shape):
        compare_filled(kernel, logits, plan, router, batch)


@pytest.mark.parametrize("policy", ALGORITHMS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_plan_bounds_its_active_experts(policy, data):
    """What a server that pages experts relies on."""
    case = data.draw(cases())
    if case.slots is None:
        case = dataclasses.replace(case, resident=None)  # as many join as there are
    plan, router = build_plan(policy, **data.draw(keys_for(policy, case))), router_of(case)
    found = run(case, plan, "torch")
    rows, experts = case.logits.shape
    exact_rows = 0 if case.exact is None else int(case.exact.sum())
    slots = None if case.resident is None else case.slots
    bound = bounds.max_active(plan, router, experts, rows, case.tokens_per_request, exact_rows, slots)
    assert found.active.sum() <= bound


@pytest.mark.parametrize(
    ("plan", "bound"),
    [
        ({"policy": "xshare", "k0": 1, "add": 24}, 40),
        ({"policy": "xshare", "k0": 1, "add_per_request": 4}, 16 + 4 * 4),
        ({"policy": "xshare", "k0": 1, "mass": 0.5}, 128),
        ({"policy": "xshare", "k0": 1, "mass": 0.5, "max_add": 24}, 40),
        ({"policy": "xshare", "k0": 1, "add": 2, "mass": 0.5, "max_add": 24}, 42),
        ({"policy": "xshare", "k0": 1, "mass": 0.5, "max_add": 24, "target_per_rank": 2}, 128),
        ({"policy": "xshare", "k0": 1, "mass": 0.5, "max_add": 24, "exact_rows": 3}, 3 * 8 + 13 + 24),
        ({"policy": "xshare", "k0": 1, "add": 500}, 128),
        ({"policy": "oea", "k0": 3}, 48),
        ({"policy": "lynx-lat", "retain": 2}, 8),
        ({"policy": "lynx-lat", "drop": 2}, 128),
        ({"policy": "moe-spec", "budget": 20}, 20),
        ({"policy": "moe-spec", "budget": 20, "scope": "request"}, 80),
        ({"policy": "moe-spec", "budget": 20, "coverage": "truncate"}, 36),
        ({"policy": "pruned", "k0": 2}, 32),
        ({"policy": "vanilla"}, 128),
        ({"policy": "xshare", "k0": 1, "add": 24, "exact_rows": 3}, 3 * 8 + 13 + 24),
        ({"policy": "oea", "k0": 3, "exact_rows": 3}, 3 * 8 + 13 * 3),
        ({"policy": "moe-spec", "budget": 20, "exact_rows": 3}, 3 * 8 + 20),
        ({"policy": "custom", "k0": 1, "add": 500, "kmax": 4, "exact_rows": 3}, 3 * 8 + 13 * 4),
        ({"policy": "vanilla", "exact_rows": 3}, 128),
    ],
)
def test_bounds(plan, bound):
    keys = {name: value for name, value in plan.items() if name != "exact_rows"}
    exact_rows = plan.get("exact_rows", 0)
    assert bounds.max_active(build_plan(keys), Router(8), 200, 16, 4, exact_rows=exact_rows) == bound


@pytest.mark.parametrize("kind", ["softmax", "sigmoid with bias", "group-limited"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scaling_multiplies_every_weight(kernel, backend, kind):
    logits, router = make_logits("normal", 6, 32), make_router(kind, 32, top_k=4)
    run = kernel if backend == "triton" else lambda *args: select(*args, backend=backend)
    plain, scaled = (run(logits, make_plan("xshare"), dataclasses.replace(router, scaling=x)) for x in (1.0, 2.5))
    assert torch.equal(scaled.topk_weights, plain.topk_weights * 2.5)
    assert torch.equal(scaled.topk_ids, plain.topk_ids)
    assert torch.equal(scaled.kept_mass, plain.kept_mass)


@pytest.mark.parametrize("scaling", [0, -1.0, float("nan"), float("inf"), True])
def test_scaling_that_is_none(scaling):
    with pytest.raises(ValueError, match=r"^scaling = .*:"):
        Router(8, scaling=scaling)
