"""The Triton kernel against the reference: compiled where there is a GPU, elsewhere under Triton's interpreter.

test_backends.py draws cases for it, has each step of a plan and each router, and on a GPU replays of a CUDA graph.
Here: what depends on programs, tiles and bits, with requests, exact rows and ranks.
"""

import itertools
import math

import pytest
import torch

from selection.cases import DTYPES, indices, spell
from selection.compared import DEVICE, HAS_GPU, OEA, TRUNCATING, VOTERS, XSHARE, compare, make_logits, make_ranks
from selection.live import select_live
from sglang_xshare import Batch, Router, RunnerSlots, build_plan, select
from sglang_xshare.selection.reference import select as select_by_reference
from sglang_xshare.selection.triton_kernel import supports
from sglang_xshare.selection.triton_kernel.tile import count_programs, make_tile

ROW = torch.arange(300, device=DEVICE)
EXPERT = torch.arange(64, device=DEVICE)
CROWDED = "lynx-acc:confidence=0.9,max_voters=2,min_votes=1 moe-spec:budget=2,coverage=truncate"
MASKABLE = "vanilla xshare:k0=1,add=5 oea:k0=1 oea:k0=1,max_rank=6 moe-spec:budget=5 pruned:k0=1 lynx-lat:retain=9"


@pytest.mark.parametrize("text", MASKABLE.split())
@pytest.mark.parametrize("exact", [False, True])
def test_masked_logits(kernel, text, exact):
    """Rows that are padding or short of experts, and fewer active experts than top-k."""
    for turn, (rows, experts, live) in enumerate([(1, 8, 1), (7, 40, 5), (7, 40, 0), (40, 64, 31), (40, 64, 1)]):
        logits = make_logits("normal", rows, experts + 3, rows, DTYPES[turn % 3])[:, :experts]
        logits[0, :5] = torch.nan
        batch = Batch((ROW[:rows] * 3) % rows < live, 1, ROW[:rows] % 4 == 1 if exact else None)
        compare(kernel, logits, spell(text), Router(4), batch, slots=RunnerSlots(masked=True))


@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
@pytest.mark.parametrize("text", [VOTERS, *CROWDED.split()])
def test_programs_agree_on_voters_and_on_who_is_rescued(kernel, text, kind):
    """Rows of several programs vote, and are rescued: more than a loop takes at a time, and some are padding."""
    plan = spell(text)
    assert make_tile(plan, Router(6), Batch(), 75, 64).several
    found = compare(kernel, make_logits(kind, 75, 64), plan, Router(6), Batch(ROW[:75] % 9 != 4))
    assert plan.confidence or found.rescued > 0


@pytest.mark.parametrize(("rows", "experts"), [(64, 256), pytest.param(300, 512, marks=pytest.mark.long)])
def test_many_rows(kernel, rows, experts):
    compare(kernel, make_logits("normal", rows, experts), spell(XSHARE), Router(8), slots=RunnerSlots())


@pytest.mark.parametrize("own_share", [0.0, 0.75])
def test_a_score_whose_reciprocal_is_infinite(kernel, own_share):
    """The third row's P at the one selected expert is e^-95; a GPU's exp may have 0."""
    logits = torch.tensor([[10.0, 0, 0, 0]] * 2 + [[0, 95.0, 0, 0]], device=DEVICE)
    plan = build_plan("custom", k0=0, add=1, own_share=own_share)
    found = kernel(logits, plan, Router(1), Batch(), make_ranks(logits))
    assert found.topk_ids.tolist() == [[0]] * 3
    assert found.topk_weights[: 3 if own_share == 0 else 2].tolist() == [[1.0]] * (3 if own_share == 0 else 2)
    assert found.topk_weights[2, 0].item() in (pytest.approx(math.exp(-95 * own_share), rel=1e-3), 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [8, 16])
def test_a_row_lists_every_expert(kernel, rows, dtype):
    """No key is left when a row has taken all experts of a full tile, and slots beyond these are empty.

    Some rows have fewer experts.
    """
    logits = make_logits("normal", rows, 16, dtype=dtype)
    logits[1, 3:] = -torch.inf
    logits[2] = -torch.inf
    logits[3] = torch.finfo(dtype).max
    logits[4] = torch.finfo(dtype).min
    found = compare(kernel, logits, spell("xshare:k0=16"), Router(16))
    assert (found.topk_ids[0] >= 0).all()
    compare(kernel, logits, spell("oea:k0=16,kmax=20"), Router(16))
    compare(kernel, logits, spell("xshare:k0=3,add=16"), Router(12, "sigmoid", renormalize=False))


@pytest.mark.parametrize(("utility", "k0"), [("topk", 1), ("topk", 0), ("full", 1)])
def test_sixteen_rows_of_one_expert_fill_its_narrow_counter(kernel, utility, k0):
    """A utility of 16 x 2^20, 16 votes and as many holders; the other experts have none of them."""
    logits = torch.full((16, 64), -torch.inf, device=DEVICE)
    logits[:, 37] = 1.0
    found = compare(kernel, logits, spell(f"xshare:k0={k0},add=1,utility={utility}"), Router(1))
    assert indices(found.active) == {37}
    for voters in (slice(None, None, 2), slice(None)):  # of an expert that nobody holds: half of the rows, and all
        logits[voters, 5] = 0.5
        found = compare(kernel, logits, spell(f"xshare:k0={k0},add={1 - k0},utility={utility}"), Router(2))
        assert (indices(found.vanilla_active), indices(found.selected)) == ({5, 37}, {37})


@pytest.mark.parametrize("tokens", [2, 3, 8, 20])
def test_requests(kernel, tokens):
    """A request's rows lie in one tile, whatever their number; padding and exact rows, of whole requests and single."""
    row = ROW[: 5 * tokens]
    valid = (row < 4 * tokens) & (row % 7 != 5)
    for exact in (None, row // tokens % 2 == 0):
        call = make_logits("ties", 5 * tokens, 48), spell("xshare:k0=1,add=5,add_per_request=3"), Router(6)
        compare(kernel, *call, Batch(valid, tokens, exact), slots=RunnerSlots())


@pytest.mark.parametrize("valid", [False, None])
def test_all_rows_padding_or_exact(kernel, valid):
    """As when a graph is captured; and with no row for a policy. Filled slots hold expert 0 of a batch of padding."""
    mark = torch.full((40,), True, device=DEVICE)
    for text in (XSHARE, VOTERS, TRUNCATING, OEA):
        batch = Batch(~mark) if valid is False else Batch(ROW[:40] % 5 != 3, 1, mark)
        found = compare(kernel, make_logits("normal", 40, 64), spell(text), Router(6), batch, slots=RunnerSlots())
        assert torch.equal(found.active, found.vanilla_active)
        assert valid is None or not found.topk_ids.any()


def test_a_narrow_plan_fills_with_an_expert_that_is_used(kernel):
    """The second row has 7 in its top-k and in S, but a slot for 0 alone: padding gets the exact row's 2."""
    logits = torch.zeros(3, 8, device=DEVICE)
    logits[0, [1, 2]], logits[1, [0, 7]] = torch.tensor([[9.0, 8.0]] * 2, device=DEVICE)
    batch = Batch(ROW[:3] < 2, 1, ROW[:3] == 0)
    found = compare(kernel, logits, spell("custom:k0=1,kmax=1,add=1"), Router(2), batch, slots=RunnerSlots())
    assert found.selected[7]
    assert found.topk_ids.tolist() == [[1, 2], [0, 0], [2, 2]]


SPREADS = {
    "more ranks than one group": EXPERT % 20,
    "a rank for each expert": EXPERT,
    "one rank": EXPERT * 0,
    "uneven ranks": (EXPERT.float().sqrt()).int(),
    "an empty group of ranks": (EXPERT // 16) * 9,
}
BALANCES = pytest.mark.parametrize("balance", ["literal", "fill", "level"])


@BALANCES
@pytest.mark.parametrize("spread", SPREADS)
def test_any_spread_over_ranks(kernel, spread, balance):
    """Targets that add nothing, some experts and all experts; int32 ranks as well as int64; ties, and exact rows."""
    text, ranks, sizes = f"xshare:k0=1,target_per_rank={{}},balance={balance}", SPREADS[spread], []
    for target in (1, 4, 64):
        found = compare(kernel, make_logits("normal", 7, 64, 3), spell(text.format(target)), Router(12), ranks=ranks)
        sizes.append(found.selected.sum())
    compare(kernel, make_logits("ties", 7, 64), spell(text.format(3)), Router(6), Batch(exact=ROW[:7] % 3 == 1), ranks)
    assert sizes == sorted(sizes)


def test_ranks_stop_at_the_target_they_meet(kernel):
    """Four ranks of four experts with utility each: two rounds make eight, and there is no third."""
    found = compare(kernel, make_logits("normal", 6, 16), spell("xshare:k0=0,target_per_rank=2"), Router(16))
    assert found.selected.sum() == 8


@BALANCES
def test_an_expert_without_a_rank_is_not_added(run, balance):
    """`select` refuses a rank of -1 on the CPU, but does not look at a GPU's tensor."""
    logits, plan = make_logits("normal", 6, 64), spell(f"xshare:k0=0,target_per_rank=5,balance={balance}")
    ranks = (EXPERT // 16).masked_fill(EXPERT % 5 == 2, -1)
    (found,) = run(select_live, logits, [plan], Router(8), Batch(), ranks)
    assert not found.selected[EXPERT % 5 == 2].any()
    if balance != "literal":  # the reference's Algorithm 5 takes -1 for one more rank
        assert torch.equal(found.selected, select_by_reference(logits, plan, Router(8), Batch(), ranks).selected)
    elif not HAS_GPU:
        assert found.selected.sum() == 20


def test_production_batches_are_one_launch():
    """Up to 16 x 128 in one program, up to 128 x 256 in so few that any GPU holds them together."""
    plan, router = spell(XSHARE), Router(8)
    assert not make_tile(plan, router, Batch(), 16, 128).several
    for rows, experts in itertools.product((16, 64, 128), (128, 256)):
        tile = make_tile(plan, router, Batch(), rows, experts)
        assert count_programs(tile, plan, Batch(), rows) <= 16


def test_what_the_kernel_leaves_to_torch():
    for text, rows, experts, router in (
        ("moe-spec:budget=8,scope=request", 16, 128, Router(8)),
        ("xshare", 2048, 128, Router(8)),
        ("xshare", 16, 513, Router(8)),
        ("xshare", 16, 96, Router(32)),
        ("xshare", 16, 96, Router(8, num_expert_group=6, topk_group=2)),
        ("xshare", 16, 96, Router(6, quota_groups=3)),
    ):
        assert not supports(spell(text), router, Batch(), rows, experts), (text, rows, experts)
    assert not supports(spell("xshare:add_per_request=2"), Router(8), Batch(tokens_per_request=64), 64, 512)
    assert supports(spell("xshare"), Router(8, num_expert_group=6, topk_group=6), Batch(), 16, 96)
    assert supports(spell("xshare"), Router(8), Batch(), 2047, 512)


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU: the kernel is compiled for it")
def test_without_a_gpu_it_says_so():
    with pytest.raises(ValueError, match="router_logits on cpu:"):
        select(make_logits("normal", 4, 16), spell(XSHARE), Router(4), backend="triton")
