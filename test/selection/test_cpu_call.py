"""The compiled call by itself: the bits of torch's sums, its memory, what it keeps, and what it refuses.

test_backends.py compares it with the reference, and to the last bit with torch.
"""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from selection.cases import fill_logits, spell
from selection.compared import BY_MASS, CLOSE, EXACT, TRUNCATING, VOTERS, Backend, compare
from selection.compiled import NEEDS_COMPILER
from selection.launched import Dispatched, forgets
from sglang_xshare import Batch, Router, RunnerSlots, select
from sglang_xshare.selection.cpu_call import find_call
from sglang_xshare.selection.torch_backend import vectorized
from sglang_xshare.selection.torch_backend.rows import lower_first
from sglang_xshare.types import Tally

__all__ = ["forgets"]
pytestmark = NEEDS_COMPILER
CPU = Backend("cpu")
SLOTS = [None, RunnerSlots(), RunnerSlots(empty=True), RunnerSlots(shared=2, shared_weight=0.4)]
XSHARE = spell("xshare:k0=1,add=24")


def make_logits(rows, experts, kind="normal"):
    return fill_logits(kind, rows, experts, rows)


@pytest.mark.parametrize("text", ["xshare:k0=1,add=24", VOTERS, "moe-spec:budget=20"])
def test_4096_rows(text):
    """Utilities of so many rows need more than 32 bits. Without the reference, which takes a minute."""
    logits = make_logits(4096, 128)
    logits[:, 0] = 30.0
    found, expected = (select(logits, spell(text), Router(8), backend=backend) for backend in ("cpu", "torch"))
    for field in EXACT + CLOSE:
        assert torch.equal(getattr(found, field), getattr(expected, field)), field


@pytest.mark.parametrize("own_share", [0.0, 0.75, 1.0])
def test_sums_of_any_width_have_torchs_bits(own_share):
    """Torch adds by lanes: how a row's scores are summed depends on how many they are."""
    for top_k in (*range(1, 18), 24, 33, 64):
        plan = dataclasses.replace(spell("custom:add=9"), k0=top_k // 2, own_share=own_share)
        compare(CPU, make_logits(9, 128), plan, Router(top_k, "sigmoid"), Batch(exact=torch.arange(9) == 4))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_a_bias_that_is_not_finite(scoring):
    bias = torch.linspace(-1, 1, 32)
    bias[3], bias[4], bias[5] = torch.nan, torch.inf, -torch.inf
    for text in (BY_MASS, VOTERS, TRUNCATING):
        compare(CPU, make_logits(9, 32, "special"), spell(text), Router(4, scoring, bias))


def test_masked_logits_and_their_tally():
    """Of runners that rank logits themselves, which none on a CPU does: those that make k count too."""
    for rows, plan in ((9, XSHARE), (1, spell("pruned:k0=1"))):
        tally = Tally(*(torch.zeros(32, dtype=torch.bool) for _ in "ab"), torch.zeros(rows), torch.tensor(0))
        call = make_logits(rows, 32, "dead rows"), plan, Router(4)
        found = CPU(*call, slots=RunnerSlots(masked=True), tally=tally)
        expected = select(*call, backend="reference", slots=RunnerSlots(masked=True))
        assert torch.equal(found.masked_logits, expected.masked_logits)
        for active in (found.active, tally.active):
            assert torch.equal(active, expected.active)


@pytest.mark.parametrize("backend", ["cpu", "torch"], indirect=True)
def test_what_is_counted_is_left_in_the_tally(backend):
    """In one layer's part of a tally of all layers, beside which nothing is written."""
    call = make_logits(6, 32), spell(TRUNCATING), Router(4), Batch(torch.arange(6) < 5)
    expected = select(*call, backend="reference")
    flags = [torch.ones(3, 32, dtype=torch.bool) for _ in range(2)]
    layers = Tally(*flags, torch.full((3, 6), 7.0), torch.full((3,), 7))
    found = backend(*call, tally=layers.of(1))
    for name in ("active", "vanilla_active", "kept_mass", "rescued"):
        tensor = getattr(layers, name)
        torch.testing.assert_close(tensor[1], getattr(expected, name), msg=name)
        assert torch.equal(getattr(found, name), tensor[1])
        assert (tensor[[0, 2]] == (7 if tensor.dtype != torch.bool else 1)).all()


def test_weights_follow_a_bias_that_changes():
    """Nothing of a router's tensors is kept: a server may load other weights into them."""
    bias = torch.zeros(16)
    call = make_logits(4, 16), XSHARE, Router(2, "sigmoid", bias)
    compare(CPU, *call)
    bias[7] = 5.0
    assert compare(CPU, *call).active[7]


@pytest.mark.parametrize("slots", SLOTS)
def test_torch_only_scores(slots):
    """One operation a call, and none that checks, fills, counts or copies."""
    call = make_logits(16, 128), XSHARE, Router(8), Batch(torch.ones(16, dtype=torch.bool))
    with Dispatched() as dispatched:
        select(*call, slots=slots)
    assert dispatched.operations == ["_softmax"]


def test_what_has_no_memory_is_left_to_torch(forgets):
    """Tensors of a trace have a shape alone."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = torch.zeros(4, 32)
        assert select(logits, XSHARE, Router(4)).topk_ids.shape == (4, 4)
        with pytest.raises(ValueError, match="backend = 'cpu': must be torch, because the logits"):
            select(logits, XSHARE, Router(4), backend="cpu")


@pytest.mark.parametrize("backend", ["cpu", "torch"], indirect=True)
def test_torchs_default_device_is_of_no_matter(backend, forgets):
    """What is cached for a shape is made under it."""
    for cached in (vectorized._first, lower_first):
        cached.cache_clear()
    call = make_logits(6, 37), spell("xshare:k0=1,add=24,acceptance=0.59"), Router(3)
    batch = Batch(torch.ones(6, dtype=torch.bool), 3)
    with torch.device("meta"):
        found = backend(*call, batch)
    assert torch.equal(found.topk_ids, select(*call, batch, backend="reference").topk_ids)


def test_a_call_without_memory_is_an_error():
    """No exception of C++ ends the process."""
    call = find_call(XSHARE, Router(4), 32)
    call._run = lambda *arguments: 2
    with pytest.raises(MemoryError, match=r"selection from router_logits \[4, 32\]: out of memory"):
        call(make_logits(4, 32), Batch(), None, None)


@pytest.mark.parametrize("slots", SLOTS)
def test_a_kept_call_refuses_exact_rows_that_its_columns_do_not_hold(slots):
    """It was made for a batch without exact rows, which take top-k experts if `kmax` allows others fewer."""
    plan, router, logits = spell("custom:k0=1,add=4,kmax=2"), Router(6), make_logits(33, 64)
    marked = Batch(exact=torch.arange(33) % 2 == 0)
    call = find_call(plan, router, 64, exact=False, slots=slots)
    before = call(logits, Batch(), None, None)
    with pytest.raises(RuntimeError, match="got exact rows, which take 6: make it with exact=True"):
        call(logits, marked, None, None)
    assert torch.equal(call(logits, Batch(), None, None).topk_ids, before.topk_ids)
    wide = find_call(plan, router, 64, exact=True, slots=slots)
    assert wide is not call
    expected = compare(CPU, logits, plan, router, marked, slots=slots)
    assert torch.equal(wide(logits, marked, None, None).topk_ids, expected.topk_ids)


def test_a_kept_call_takes_exact_rows_that_its_columns_hold():
    plan, router, logits = spell("custom:k0=1,add=4,kmax=8"), Router(6), make_logits(9, 64)
    marked = Batch(exact=torch.arange(9) == 4)
    found = find_call(plan, router, 64, exact=False)(logits, marked, None, None)
    assert torch.equal(found.topk_ids, compare(CPU, logits, plan, router, marked).topk_ids)


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_call_refuses_tensors_of_another_width(difference):
    """The width of what is written is checked against what was allocated."""
    call = find_call(XSHARE, Router(4), 32)
    call = type(call)(XSHARE, call.router, 32, False, None)
    call._width += difference
    with pytest.raises(RuntimeError, match="a call for rows of"):
        call(make_logits(4, 32), Batch(), None, None)
