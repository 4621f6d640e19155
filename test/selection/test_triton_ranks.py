"""The Triton kernel balances expert-parallel ranks as the reference does, however experts are spread over the ranks."""

import pytest
import torch

from selection.compared import DEVICE, HAS_GPU, compare, kernel, make_logits, run
from selection.live import select_live
from sglang_xshare import Batch, Router, build_plan
from sglang_xshare.selection.reference import select as select_by_reference

__all__ = ["kernel", "run"]

EXPERTS = torch.arange(64, device=DEVICE)
SPREADS = {
    "four even ranks": EXPERTS // 16,
    "every fourth expert": EXPERTS % 4,
    "more ranks than one group": EXPERTS % 20,
    "a rank for each expert": EXPERTS,
    "one rank": EXPERTS * 0,
    "uneven ranks": (EXPERTS.float().sqrt()).int(),
    "an empty rank": (EXPERTS // 16).where(EXPERTS // 16 != 2, 5),
    "an empty group of ranks": (EXPERTS // 16) * 9,
}
BALANCES = ["literal", "fill", "level"]


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("spread", SPREADS)
def test_any_spread(kernel, spread, balance):
    """Targets that add nothing, some experts and all experts; int32 ranks as well as int64."""
    logits = make_logits("normal", 7, 64, seed=3)
    sizes = []
    for target in (1, 4, 64):
        plan = build_plan("xshare", k0=1, target_per_rank=target, balance=balance)
        sizes.append(compare(kernel, logits, plan, Router(12), Batch(), SPREADS[spread]).selected.sum())
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("kind", ["equal", "ties"])
def test_ties_within_a_rank(kernel, kind, balance):
    """Of equal experts of a rank the lower index wins."""
    logits = make_logits(kind, 5, 64, seed=1)
    for target in (2, 3):
        plan = build_plan("xshare", k0=0, target_per_rank=target, balance=balance, utility="full")
        compare(kernel, logits, plan, Router(8), Batch(), SPREADS["uneven ranks"])


@pytest.mark.parametrize("balance", BALANCES)
def test_nothing_is_left_to_add(kernel, balance):
    """Without a live row no expert has utility; with a warm-up of the whole top-k none with utility is outside S."""
    logits, plan = make_logits("normal", 6, 64), build_plan("xshare", k0=8, target_per_rank=30, balance=balance)
    ranks = SPREADS["an empty rank"]
    found = compare(kernel, logits, plan, Router(8), Batch(torch.zeros(6, dtype=torch.bool, device=DEVICE)), ranks)
    assert not found.selected.any()
    found = compare(kernel, logits, plan, Router(8), Batch(), ranks)
    assert torch.equal(found.selected, found.vanilla_active)


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("target", [1, 3, 9])
def test_experts_of_exact_rows_do_not_count(kernel, balance, target):
    exact = torch.arange(9, device=DEVICE) % 3 == 1
    plan = build_plan("xshare", k0=1, target_per_rank=target, balance=balance)
    compare(
        kernel, make_logits("normal", 9, 64), plan, Router(6), Batch(exact=exact), SPREADS["more ranks than one group"]
    )


@pytest.mark.parametrize("balance", BALANCES)
def test_an_expert_without_a_rank_is_not_added(run, balance):
    """`select` refuses a rank of -1 on the CPU, but does not look at a GPU's tensor."""
    logits, plan = make_logits("normal", 6, 64), build_plan("xshare", k0=0, target_per_rank=5, balance=balance)
    homeless = EXPERTS % 5 == 2
    ranks = SPREADS["four even ranks"].masked_fill(homeless, -1)
    (found,) = run(select_live, logits, [plan], Router(8), Batch(), ranks)
    assert not found.selected[homeless].any()
    if balance != "literal":  # the reference's Algorithm 5 takes -1 for one more rank
        assert torch.equal(found.selected, select_by_reference(logits, plan, Router(8), Batch(), ranks, None).selected)
    elif not HAS_GPU:
        assert found.selected.sum() == 20
