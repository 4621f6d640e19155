"""What runners take besides slots: shared experts' columns, and masked logits where they rank them themselves."""

import pytest
import torch

from selection.cases import DTYPES
from selection.compared import DEVICE, EVERY_PLAN, kernel, make_logits, make_plan, make_ranks
from sglang_xshare import Batch, Router, RunnerSlots, build_plan, select

__all__ = ["kernel"]


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_shared_experts_have_columns_behind_the_others(backend):
    logits, valid = make_logits("normal", 7, 24).cpu(), torch.arange(7) % 3 != 1
    call = logits, make_plan("dynamic-skip"), Router(4), Batch(valid)
    filled = select(*call, backend=backend, slots=RunnerSlots())
    found = select(*call, backend=backend, slots=RunnerSlots(shared=2, shared_weight=0.4))
    assert torch.equal(found.topk_ids, torch.cat([filled.topk_ids, torch.tensor([[24, 25]] * 7)], 1).int())
    assert torch.equal(found.topk_weights, torch.cat([filled.topk_weights, torch.full((7, 2), 0.4)], 1))
    assert found.topk_ids.dtype == torch.int32
    assert torch.equal(found.active, filled.active)


@EVERY_PLAN
@pytest.mark.parametrize(("rows", "shared"), [(7, 1), (40, 2)])
def test_the_kernel_writes_shared_experts(kernel, name, rows, shared):
    """In one program and in several; behind rows without experts too, and behind as many columns as a tile has."""
    logits, ranks = make_logits("normal", rows, 128, seed=rows), make_ranks(128)
    top_k = 31 if name == "xshare" else 6
    call = logits, make_plan(name), Router(top_k), Batch(torch.arange(rows, device=DEVICE) % 5 != 3), ranks
    slots = RunnerSlots(shared=shared, shared_weight=0.4)
    expected = select(*call, backend="reference", slots=slots)
    found = kernel(*call, slots=slots)
    assert torch.equal(found.topk_ids, expected.topk_ids)
    torch.testing.assert_close(found.topk_weights, expected.topk_weights, atol=1e-6, rtol=2e-6)
    assert torch.equal(found.active, expected.active)


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("name", ["xshare", "dynamic-skip", "moe-spec truncating"])
@pytest.mark.parametrize("rows", [7, 40])
def test_slots_that_stay_empty(kernel, name, rows, shared):
    """In one program and in several, the ids of a selection for no runner; shared experts behind them in every row."""
    logits, ranks = make_logits("normal", rows, 64, seed=rows), make_ranks(64)
    call = logits, make_plan(name), Router(6), Batch(torch.arange(rows, device=DEVICE) % 5 != 3), ranks
    slots = RunnerSlots(shared=shared, shared_weight=0.4, empty=True)
    bare = select(*call, backend="reference")
    assert (bare.topk_ids < 0).any()
    behind = torch.full((rows, shared), 64, dtype=torch.int32, device=DEVICE)
    runs = [kernel(*call, slots=slots)]
    runs += [select(*call, backend=backend, slots=slots) for backend in ("reference", "torch")]
    for found in runs:
        assert torch.equal(found.topk_ids, torch.cat([bare.topk_ids, behind], 1))
        weights = torch.cat([bare.topk_weights, torch.full_like(behind, 0.4, dtype=torch.float32)], 1)
        torch.testing.assert_close(found.topk_weights, weights, atol=1e-6, rtol=2e-6)
        assert torch.equal(found.active, bare.active)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"empty": True, "masked": True}, "empty = True:"),
        ({"shared": -1}, "shared = -1"),
        ({"masked": True, "shared": 1}, "masked = True:"),
    ],
)
def test_what_cannot_be_asked_for(keys, named):
    with pytest.raises(ValueError, match=named):
        RunnerSlots(**keys)


MASKED = {
    "xshare": {"policy": "xshare", "k0": 1, "add": 5},
    "few selected": {"policy": "oea", "k0": 1},
    "own": {"policy": "pruned", "k0": 1},
    "vanilla": {"policy": "vanilla"},
    "limited reach": {"policy": "oea", "k0": 1, "max_rank": 6},
    "unvoted": {"policy": "moe-spec", "budget": 5},
}


@pytest.mark.parametrize("plan", MASKED)
@pytest.mark.parametrize(
    ("rows", "experts", "live", "dtype"),
    [
        (1, 8, 1, torch.float32),
        *((7, 40, 5, dtype) for dtype in DTYPES),
        (7, 40, 1, torch.float16),
        (7, 40, 0, torch.bfloat16),
        (40, 64, 31, torch.bfloat16),
    ],
)
def test_the_kernel_masks_logits(kernel, plan, dtype, rows, experts, live):
    """Rows that are padding or short of experts, fewer active experts than top-k, one program and several."""
    logits = make_logits("normal", rows, experts + 3, seed=rows, dtype=dtype)[:, :experts]
    logits[0, :5] = torch.nan
    call = logits, build_plan(MASKED[plan]), Router(4), Batch((torch.arange(rows, device=DEVICE) * 3) % rows < live)
    expected = select(*call, backend="reference", slots=RunnerSlots(masked=True))
    found = kernel(*call, slots=RunnerSlots(masked=True))
    assert found.masked_logits.dtype == dtype
    assert torch.equal(found.masked_logits, expected.masked_logits)
    for name in ("topk_ids", "selected", "active", "vanilla_active"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
