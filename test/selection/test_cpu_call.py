"""The compiled call against the torch backend, to the last bit, the reference, and the papers' algorithms."""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from selection.cases import DTYPES, batch_of, cases, fill_logits, keys_for, router_of
from selection.compared import EVERY_PLAN, RESIDENT_PLANS, ROUTERS, make_plan, make_router, move_router
from selection.compiled import NEEDS_COMPILER
from selection.draws import any_plans, marked
from selection.expected import check
from selection.launched import Dispatched, forgets
from selection.oracle import ALGORITHMS
from sglang_xshare import Batch, Router, RunnerSlots, build_plan, select
from sglang_xshare.selection.cpu_call import prepare
from sglang_xshare.selection.torch_backend import vectorized
from sglang_xshare.selection.torch_backend.rows import lower_first
from sglang_xshare.types import Tally

__all__ = ["forgets"]
pytestmark = NEEDS_COMPILER
FIELDS = ("topk_ids", "topk_weights", "selected", "active", "vanilla_active", "rescued", "kept_mass")
CLOSE = ("topk_weights", "kept_mass")
SLOTS = [None, RunnerSlots(), RunnerSlots(empty=True), RunnerSlots(shared=2, shared_weight=0.4)]
often = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def compare(logits, plan, router, batch=None, ranks=None, slots=None):
    """The call's answer: every bit is the torch backend's, ids and sets the reference's, weights nearly."""
    ranks = torch.arange(logits.shape[1]) * 4 // logits.shape[1] if ranks is None else ranks
    given = logits.clone()
    found, same, expected = (
        select(logits, plan, router, batch, ranks, backend, slots=slots) for backend in ("cpu", "torch", "reference")
    )
    for name in FIELDS:
        one, other, truth = (getattr(answer, name) for answer in (found, same, expected))
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
        if name in CLOSE:
            torch.testing.assert_close(one, truth, atol=1e-6, rtol=2e-6)
        else:
            assert torch.equal(one, truth), name
    assert torch.equal(logits.nan_to_num(), given.nan_to_num())
    return found


def make_logits(kind, rows, experts, seed=0, dtype=torch.float32):
    return fill_logits(kind, rows, experts, seed).to(dtype)


def router_like(kind, experts):
    return move_router(make_router(kind, experts), "cpu")


@pytest.mark.parametrize("policy", ALGORITHMS)
@often
@given(data=st.data())
def test_random_cases(policy, data):
    """Every key over its range, as the paper has it."""
    case = data.draw(cases(max_experts=128))
    keys = data.draw(keys_for(policy, case))
    check(case, policy, keys, backends=("cpu",))
    slots = data.draw(st.sampled_from(SLOTS))
    plan, ranks = build_plan(policy, **keys), torch.tensor(case.rank_of_expert)
    compare(case.logits, plan, router_of(case), batch_of(case), ranks, slots)


@often
@given(data=st.data())
def test_random_plans(data):
    """The steps of different papers together, rows of other widths, exact rows and residents."""
    case = data.draw(marked(max_experts=256))
    plan, slots = data.draw(any_plans(case)), data.draw(st.sampled_from(SLOTS))
    compare(case.logits, plan, router_of(case), batch_of(case), torch.tensor(case.rank_of_expert), slots)


@EVERY_PLAN
@pytest.mark.parametrize(("rows", "experts"), [(1, 16), (5, 40), (16, 128), (20, 160), (64, 256)])
def test_shapes(name, rows, experts):
    valid = torch.arange(rows) % 5 != 3
    compare(make_logits("normal", rows, experts, rows), make_plan(name), Router(6), Batch(valid))


@pytest.mark.parametrize("name", ["xshare", "lynx-acc", "moe-spec"])
def test_4096_rows(name):
    """Utilities of so many rows need more than 32 bits. Without the reference, which takes a minute."""
    logits = make_logits("normal", 4096, 128)
    logits[:, 0] = 30.0
    found, expected = (select(logits, make_plan(name), Router(8), backend=backend) for backend in ("cpu", "torch"))
    for field in FIELDS:
        assert torch.equal(getattr(found, field), getattr(expected, field)), field


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("name", ["vanilla", "xshare", "xshare by mass", "lynx-acc", "oea", "moe-spec truncating"])
def test_routers(kind, name):
    plan = make_plan(name)
    if kind == "top-k of each group" and plan.kmax:
        plan = dataclasses.replace(plan, kmax=None)
    compare(make_logits("normal", 12, 64), plan, router_like(kind, 64))


@pytest.mark.parametrize("top_k", [*range(1, 18), 24, 33, 64])
@pytest.mark.parametrize("own_share", [0.0, 0.75, 1.0])
def test_sums_of_any_width_have_torchs_bits(top_k, own_share):
    """Torch adds by lanes: how a row's scores are summed depends on how many they are."""
    plan = build_plan("custom", k0=top_k // 2, add=9, own_share=own_share)
    compare(make_logits("normal", 9, 128, top_k), plan, Router(top_k, "sigmoid"), Batch(exact=torch.arange(9) == 4))


@EVERY_PLAN
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["ties", "special", "dead rows", "huge", "wide"])
def test_ties_and_what_is_not_finite(name, kind, dtype):
    compare(make_logits(kind, 9, 32, dtype=dtype), make_plan(name), Router(4))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ["xshare by mass", "lynx-acc", "moe-spec truncating"])
def test_what_is_not_finite_under_other_scores(name, scoring, biased):
    bias = torch.linspace(-1, 1, 32) if biased else None
    if bias is not None:
        bias[3], bias[4], bias[5] = torch.nan, torch.inf, -torch.inf
    compare(make_logits("special", 9, 32), make_plan(name), Router(4, scoring, bias))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_padding_may_hold_anything(value):
    """Rows that are not live, whose logits nobody has computed."""
    logits, valid = make_logits("normal", 8, 32), torch.arange(8) < 5
    logits[5:] = value
    compare(logits, make_plan("xshare"), Router(4), Batch(valid, 1, torch.arange(8) % 3 == 0), slots=RunnerSlots())


@pytest.mark.parametrize("name", RESIDENT_PLANS)
@pytest.mark.parametrize("slots", [None, 4, 24])
@pytest.mark.parametrize("free", [None, True, False])
def test_residents(name, slots, free):
    plan = build_plan("custom", **RESIDENT_PLANS[name], free_residents=free)
    resident = torch.arange(48) % 3 == 1
    compare(make_logits("normal", 8, 48), plan, Router(6), Batch(None, 2, None, resident, slots))


def test_masked_logits():
    """Of runners that rank logits themselves, which none on a CPU does."""
    for rows, plan in ((9, make_plan("xshare")), (1, build_plan("pruned", k0=1))):
        found, tallies = [], []
        for backend in ("cpu", "torch"):
            tallies.append(
                Tally(*(torch.zeros(32, dtype=torch.bool) for _ in "ab"), torch.zeros(rows), torch.tensor(0))
            )
            logits, slots = make_logits("dead rows", rows, 32), RunnerSlots(masked=True)
            found.append(select(logits, plan, Router(4), backend=backend, slots=slots, tally=tallies[-1]))
        for answers in (found, tallies):
            assert torch.equal(answers[0].active, answers[1].active)
        assert torch.equal(found[0].masked_logits, found[1].masked_logits)


@pytest.mark.parametrize("slices", [(slice(None), slice(3, 35)), (slice(None, None, 2), slice(None)), None])
def test_strides(slices):
    """Logits that are part of a larger tensor, or lie the other way round; flags and a bias too."""
    wide = make_logits("normal", 32, 64)
    logits = wide.T if slices is None else wide[slices]
    rows, experts = logits.shape
    bias = torch.linspace(-1, 1, 2 * experts, dtype=torch.bfloat16)[::2]
    resident = (torch.arange(2 * experts) % 3 == 0)[::2]
    batch = Batch((torch.arange(2 * rows) % 5 != 2)[::2], 1, (torch.arange(2 * rows) % 7 == 0)[::2], resident, experts)
    router = Router(8, "sigmoid", bias, expert_scale=bias.double() + 2)
    compare(logits, make_plan("xshare"), router, batch)


def test_what_is_counted_is_left_in_the_tally():
    """In rows of tables of all layers, beside which nothing is written."""
    call = make_logits("normal", 6, 32), make_plan("moe-spec truncating"), Router(4), Batch(torch.arange(6) < 5)
    expected = select(*call, backend="reference")
    for backend in ("cpu", "torch"):
        flags = [torch.ones(3, 32, dtype=torch.bool) for _ in range(2)]
        tables = Tally(*flags, torch.full((3, 6), 7.0), torch.full((3,), 7))
        found = select(*call, backend=backend, tally=tables.of(1))
        for name in ("active", "vanilla_active", "kept_mass", "rescued"):
            table = getattr(tables, name)
            torch.testing.assert_close(table[1], getattr(expected, name), msg=f"{backend}, {name}")
            assert torch.equal(getattr(found, name), table[1])
            assert (table[[0, 2]] == (7 if table.dtype != torch.bool else 1)).all()


def test_weights_follow_a_bias_that_changes():
    """Nothing of a router's tensors is kept: a server may load other weights into them."""
    bias = torch.zeros(16)
    router, logits, plan = Router(2, "sigmoid", bias), make_logits("normal", 4, 16), make_plan("xshare")
    compare(logits, plan, router)
    bias[7] = 5.0
    assert compare(logits, plan, router).active[7]


@pytest.mark.parametrize("slots", SLOTS)
def test_torch_only_scores(slots):
    """One operation a call, and none that checks, fills, counts or copies."""
    call = make_logits("normal", 16, 128), make_plan("xshare"), Router(8), Batch(torch.ones(16, dtype=torch.bool))
    with Dispatched() as dispatched:
        select(*call, slots=slots)
    assert dispatched.operations == ["_softmax"]


def test_what_has_no_memory_is_left_to_torch(forgets):
    """Tensors of a trace have a shape alone."""
    plan = make_plan("xshare")
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = torch.zeros(4, 32)
        assert select(logits, plan, Router(4)).topk_ids.shape == (4, 4)
        with pytest.raises(ValueError, match="the logits are no plain tensor on cpu"):
            select(logits, plan, Router(4), backend="cpu")


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_torchs_default_device_is_of_no_matter(backend, forgets):
    """What is cached for a shape is made under it."""
    for cached in (vectorized._first, lower_first):
        cached.cache_clear()
    logits, plan, router = make_logits("normal", 6, 37), make_plan("xshare"), Router(3)
    batch = Batch(torch.ones(6, dtype=torch.bool), 3)
    plan = dataclasses.replace(plan, acceptance=0.59)
    with torch.device("meta"):
        found = select(logits, plan, router, batch, backend=backend)
    assert torch.equal(found.topk_ids, select(logits, plan, router, batch, backend="reference").topk_ids)


def test_more_slots_than_a_32_bit_number_are_all_slots():
    resident = torch.arange(32) % 2 == 0
    compare(make_logits("normal", 4, 32), make_plan("xshare"), Router(4), Batch(resident=resident, slots=2**31 + 1))


def test_the_deepest_draft_there_can_be_is_warm():
    depth = torch.tensor([0, 1, 2**31 - 1, 3], dtype=torch.int32)
    compare(make_logits("normal", 4, 32), make_plan("xshare"), Router(4), Batch(None, 4, depth=depth))


def test_a_call_without_memory_is_an_error():
    """No exception of C++ ends the process."""
    call = prepare(make_plan("xshare"), Router(4), 32)
    call._run = lambda *arguments: 2
    with pytest.raises(MemoryError, match=r"selection from router_logits \[4, 32\]: out of memory"):
        call(make_logits("normal", 4, 32), Batch(), None, None)


@pytest.mark.parametrize("slots", SLOTS)
def test_a_kept_call_refuses_exact_rows_that_its_columns_do_not_hold(slots):
    """It was prepared for a batch without exact rows, which take top-k experts where `kmax` allows others fewer."""
    plan, router, logits = build_plan("custom", k0=1, add=4, kmax=2), Router(6), make_logits("normal", 33, 64)
    marked = Batch(exact=torch.arange(33) % 2 == 0)
    call = prepare(plan, router, 64, exact=False, slots=slots)
    before = call(logits, Batch(), None, None)
    with pytest.raises(RuntimeError, match="got exact rows, which take 6: prepare it with exact=True"):
        call(logits, marked, None, None)
    assert torch.equal(call(logits, Batch(), None, None).topk_ids, before.topk_ids)
    wide = prepare(plan, router, 64, exact=True, slots=slots)
    assert wide is not call
    assert torch.equal(
        wide(logits, marked, None, None).topk_ids, compare(logits, plan, router, marked, slots=slots).topk_ids
    )


def test_a_kept_call_takes_exact_rows_that_its_columns_hold():
    plan, router, logits = build_plan("custom", k0=1, add=4, kmax=8), Router(6), make_logits("normal", 9, 64)
    marked = Batch(exact=torch.arange(9) == 4)
    found = prepare(plan, router, 64, exact=False)(logits, marked, None, None)
    assert torch.equal(found.topk_ids, compare(logits, plan, router, marked).topk_ids)


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_call_refuses_tensors_of_another_width(difference):
    """The width of what is written is checked against what was allocated."""
    call = prepare(make_plan("xshare"), Router(4), 32)
    call = type(call)(call.plan, call.router, 32, False, None)
    call._width += difference
    with pytest.raises(RuntimeError, match="a call for rows of"):
        call(make_logits("normal", 4, 32), Batch(), None, None)
