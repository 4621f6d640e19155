"""The alignment that the selection kernel writes, against the plain reference for the ids that it writes beside."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selection.aligned import find_problems
from selection.cases import cases, keys_for
from selection.compared import DEVICE, EVERY_PLAN, few, kernel, make_logits, make_plan, make_ranks, on_device
from selection.oracle import ALGORITHMS
from sglang_xshare import Batch, Router, RunnerSlots, build_plan, select
from sglang_xshare.selection.alignment import count_blocks
from sglang_xshare.selection.triton_kernel import supports
from sglang_xshare.selection.triton_kernel.tile import make_tile

__all__ = ["kernel"]
ALIGNED = RunnerSlots(aligned=True)


def check(kernel, logits, plan, router, batch=None, ranks=None, slots=ALIGNED):
    """Return the kernel's answer, whose ids are the reference's and whose alignment is that of its ids."""
    call = logits, plan, router, batch or Batch(), make_ranks(logits.shape[1]) if ranks is None else ranks
    found = kernel(*call, slots=slots)
    assert torch.equal(found.topk_ids, select(*call, backend="reference", slots=slots).topk_ids)
    assert find_problems(found.alignment, found.topk_ids) == []
    pairs = found.topk_ids.numel()
    assert [len(one) for one in found.alignment] == [16 * pairs, pairs, 1]
    assert all(one.data_ptr() % 16 == 0 for one in found.alignment), "another kernel would be compiled for it"
    return found


@EVERY_PLAN
@pytest.mark.parametrize(("rows", "experts", "shared"), [(1, 16, 0), (5, 40, 1), (13, 60, 0), (16, 128, 3)])
def test_every_plan(kernel, name, rows, experts, shared):
    """With padding rows, whose slots a live row's expert fills, and shared experts, which all rows have."""
    valid = torch.arange(rows, device=DEVICE) % 5 != 3
    slots = RunnerSlots(shared=shared, shared_weight=0.4, aligned=True)
    check(kernel, make_logits("ties", rows, experts, seed=rows), make_plan(name), Router(6), Batch(valid), slots=slots)


@pytest.mark.parametrize("policy", ALGORITHMS)
@settings(few, max_examples=8)
@given(data=st.data())
def test_random_cases(kernel, policy, data):
    """Requests that do not fill their tile, exact rows, residents, drafts, more columns than the model's top-k."""
    case = data.draw(cases(max_requests=3, max_tokens=5, max_experts=64))
    plan = build_plan(policy, **data.draw(keys_for(policy, case)))
    logits, router, batch, ranks = on_device(case)
    if supports(plan, router, batch, *logits.shape) and make_tile(plan, router, batch, *logits.shape).rows <= 16:
        check(kernel, logits, plan, router, batch, ranks)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_batch_of_padding_rows(kernel, rows):
    """All slots hold expert 0, which takes as many blocks as that needs."""
    valid = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    found = check(kernel, make_logits("normal", rows, 32), make_plan("oea"), Router(6), Batch(valid))
    assert found.alignment.num_tokens_post_padded.item() == count_blocks(1, 10 * rows) * 16


def test_an_expert_that_fills_many_slots_of_several_rows(kernel):
    """Each row keeps one of two experts and fills seven slots with it: 64 pairs an expert, four blocks."""
    logits = torch.zeros(16, 32, device=DEVICE)
    logits[:8, 3] = logits[8:, 20] = 9
    found = check(kernel, logits, build_plan("pruned", k0=1), Router(8))
    assert found.alignment.expert_ids[:8].tolist() == [3] * 4 + [20] * 4
    assert found.alignment.num_tokens_post_padded.item() == 128


def test_what_is_not_aligned(kernel):
    """Several programs, empty slots, no slots, masked logits, and no wish for it."""
    plan = make_plan("xshare")
    for rows, slots in (
        (17, ALIGNED),
        (16, RunnerSlots(empty=True, aligned=True)),
        (16, RunnerSlots(masked=True, aligned=True)),
        (16, RunnerSlots()),
        (16, None),
        (0, ALIGNED),
    ):
        assert kernel(make_logits("normal", rows, 64), plan, Router(4), slots=slots).alignment is None


@pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])
def test_other_backends_leave_it_to_upstream(backend):
    logits = make_logits("normal", 4, 32).cpu()
    assert select(logits, make_plan("xshare"), Router(4), backend=backend, slots=ALIGNED).alignment is None
