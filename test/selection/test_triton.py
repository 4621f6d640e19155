"""The Triton kernel against the reference: compiled where there is a GPU, elsewhere under Triton's interpreter.

Covered: every plan it supports, one program and several, sizes that are no powers of two, requests, padding anywhere,
ties, three dtypes, non-finite logits, strides; on a GPU, replays of a CUDA graph as well.
"""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from selection.cases import DTYPES, cases, keys_for
from selection.compared import (
    DEVICE,
    EVERY_PLAN,
    EXACT,
    HAS_GPU,
    ROUTERS,
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
from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.selection.triton_kernel import supports
from sglang_xshare.selection.triton_kernel.tile import count_programs, make_tile
from sglang_xshare.types import SCORINGS

__all__ = ["kernel"]


@pytest.mark.parametrize("policy", ALGORITHMS)
@settings(few, max_examples=4 if HAS_GPU else 12)
@given(data=st.data())
def test_random_cases(kernel, policy, data):
    """Every key over its range; what the kernel does not serve, it refuses."""
    case = dataclasses.replace(data.draw(cases(max_experts=128)), exact=None, resident=None, slots=None)
    plan = build_plan(policy, **data.draw(keys_for(policy, case)))
    logits, router, batch, ranks = on_device(case)
    if supports(plan, router, batch, *logits.shape):
        compare(kernel, logits, plan, router, batch, ranks)
    else:
        with pytest.raises(ValueError, match=r"supports|not implemented by backend triton"):
            kernel(logits, plan, router, batch, ranks)


@EVERY_PLAN
@pytest.mark.parametrize(("rows", "experts"), [(1, 16), (5, 40), (16, 128), (20, 160)])
def test_shapes(kernel, name, rows, experts):
    """One program and several, with rows, experts and budgets that fill no tile."""
    valid = torch.arange(rows, device=DEVICE) % 5 != 3
    logits = make_logits("normal", rows, experts, seed=rows)
    compare(kernel, logits, make_plan(name), Router(6), Batch(valid))


def test_ranks_stop_at_the_target_they_meet(kernel):
    """Four ranks of four experts with utility each: two rounds make eight, and there is no third."""
    plan = build_plan("xshare", k0=0, target_per_rank=2)
    found = compare(kernel, make_logits("normal", 6, 16), plan, Router(16))
    assert found.selected.sum() == 8


@pytest.mark.parametrize(("rows", "experts"), [(64, 128), (64, 256), pytest.param(300, 512, marks=pytest.mark.long)])
def test_many_rows(kernel, rows, experts):
    compare(kernel, make_logits("normal", rows, experts), make_plan("xshare"), Router(8))


@pytest.mark.parametrize("mass", [0.3, 1.0])
@pytest.mark.parametrize(("rows", "experts"), [(16, 256), (300, 8)])
def test_utilities_beyond_31_bits_together_and_alone_near_them(kernel, rows, experts, mass):
    """Sigmoids near 1: 4096 of them add up to 2^32, those of 300 rows to more than 2^28 an expert."""
    plan = build_plan("xshare", k0=0, mass=mass, utility="full")
    found = compare(kernel, make_logits("normal", rows, experts) + 4, plan, Router(2, "sigmoid"))
    assert found.selected.all() == (mass == 1)


@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
@pytest.mark.parametrize("name", ["lynx-acc", "lynx-acc of few voters", "moe-spec truncating"])
def test_programs_agree_on_voters_and_on_who_is_rescued(kernel, name, kind):
    """Rows of several programs vote, and are rescued: more than a loop takes at a time, and some are padding."""
    logits = make_logits(kind, 75, 64)
    valid = torch.arange(75, device=DEVICE) % 9 != 4
    plan = dataclasses.replace(make_plan(name), budget=2) if name == "moe-spec truncating" else make_plan(name)
    assert make_tile(plan, Router(6), Batch(), 75, 64).several
    found = compare(kernel, logits, plan, Router(6), Batch(valid))
    assert plan.confidence or found.rescued > 0


@pytest.mark.parametrize(
    "kind",
    ROUTERS,
)
@pytest.mark.parametrize("name", ["vanilla", "xshare", "moe-spec truncating"])
def test_routers(kernel, kind, name):
    compare(kernel, make_logits("normal", 12, 64), make_plan(name), make_router(kind, 64))


@pytest.mark.parametrize("kind", ["softmax with bias", "sigmoid", "group-limited"])
@pytest.mark.parametrize("logits", ["normal", "huge"])
def test_own_share_of_routers(kernel, kind, logits):
    """Of huge logits many rows have no score at all, of their own or within S."""
    plan = build_plan("custom", k0=0, add=5, utility="squared", own_share=0.75)
    compare(kernel, make_logits(logits, 12, 64), plan, make_router(kind, 64))


@pytest.mark.parametrize("own_share", [0.0, 0.75])
def test_a_score_whose_reciprocal_is_infinite(kernel, own_share):
    """The third row's P at the one selected expert is e^-95; a GPU's exp may have 0."""
    logits = torch.tensor([[10.0, 0, 0, 0]] * 2 + [[0, 95.0, 0, 0]], device=DEVICE)
    plan = build_plan("custom", k0=0, add=1, own_share=own_share)
    found = kernel(logits, plan, Router(1), Batch(), make_ranks(4))
    assert found.topk_ids.tolist() == [[0]] * 3
    assert found.topk_weights[: 3 if own_share == 0 else 2].tolist() == [[1.0]] * (3 if own_share == 0 else 2)
    assert found.topk_weights[2, 0].item() in (pytest.approx(math.exp(-95 * own_share), rel=1e-3), 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["xshare by mass", "lynx-acc", "lynx-lat", "moe-spec", "oea in its group"])
@pytest.mark.parametrize("kind", ["sqrtsoftplus with bias", "top-k of each group"])
def test_a_score_without_bound_and_groups_with_shares(kernel, kind, name, dtype):
    """In the plans that add up whole rows of scores, or look down a row's own ranking."""
    plan = build_plan("oea", k0=3, p=0.5, max_rank=12) if name == "oea in its group" else make_plan(name)
    compare(kernel, make_logits("ties", 9, 32, dtype=dtype) * 3, plan, make_router(kind, 32))


@EVERY_PLAN
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["ties", "special", "dead rows"])
def test_ties_and_what_is_not_finite(kernel, name, kind, dtype):
    """Sixteen-bit logits take another way to break ties than fp32."""
    compare(kernel, make_logits(kind, 9, 32, dtype=dtype), make_plan(name), Router(4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [8, 16])
def test_a_row_lists_every_expert(kernel, rows, dtype):
    """No key is left once a row has taken all experts of a full tile; some rows have fewer than their slots."""
    logits = make_logits("normal", rows, 16, dtype=dtype)
    logits[1, 3:] = -torch.inf
    logits[2] = -torch.inf
    logits[3] = torch.finfo(dtype).max
    logits[4] = torch.finfo(dtype).min
    found = compare(kernel, logits, build_plan("xshare", k0=16), Router(16))
    assert (found.topk_ids[0] >= 0).all()
    compare(kernel, logits, build_plan("xshare", k0=3, add=16), Router(12, "sigmoid", renormalize=False))


@pytest.mark.parametrize(("utility", "k0"), [("topk", 1), ("topk", 0), ("full", 1)])
def test_sixteen_rows_of_one_expert_fill_its_narrow_counter(kernel, utility, k0):
    """A utility of 16 x 2^20, 16 votes and as many holders; the other experts have none of them."""
    logits = torch.full((16, 64), -torch.inf, device=DEVICE)
    logits[:, 37] = 1.0
    found = compare(kernel, logits, build_plan("xshare", k0=k0, add=1, utility=utility), Router(1))
    assert found.active.nonzero().flatten().tolist() == [37]
    for voters in (slice(None, None, 2), slice(None)):  # of an expert that nobody holds: half of the rows, and all
        logits[voters, 5] = 0.5
        found = compare(kernel, logits, build_plan("xshare", k0=k0, add=1 - k0, utility=utility), Router(2))
        assert found.vanilla_active.nonzero().flatten().tolist() == [5, 37]
        assert found.selected.nonzero().flatten().tolist() == [37]


@pytest.mark.parametrize("scoring", SCORINGS)
def test_equal_scores_in_another_order_tie(kernel, scoring):
    """Rows with the same few scores at other experts give every expert the same utility: the lower index wins."""
    scores = torch.tensor([1.3, 0.7, 0.1, -0.4, -1.9, -30, -30, -30])
    logits = torch.stack([scores.roll(shift) for shift in range(8)]).to(DEVICE)
    found = compare(kernel, logits, build_plan("custom", k0=0, add=3), Router(5, scoring))
    assert found.selected.tolist() == [True] * 3 + [False] * 5


@pytest.mark.parametrize("tokens", [2, 3, 4, 8, 20])
def test_requests(kernel, tokens):
    """A request's rows lie in one tile, whatever their number; padding takes whole requests and single rows."""
    rows = 5 * tokens
    valid = (torch.arange(rows, device=DEVICE) < 4 * tokens) & (torch.arange(rows, device=DEVICE) % 7 != 5)
    plan = build_plan("xshare", k0=1, add=5, add_per_request=3)
    compare(kernel, make_logits("ties", rows, 48), plan, Router(6), Batch(valid, tokens))


@EVERY_PLAN
def test_only_padding(kernel, name):
    logits = make_logits("normal", 40, 128)
    found = compare(kernel, logits, make_plan(name), Router(8), Batch(torch.zeros(40, dtype=torch.bool, device=DEVICE)))
    assert not found.active.any()


def test_no_rows(kernel):
    found = compare(kernel, make_logits("normal", 0, 128), make_plan("xshare"), Router(8))
    assert found.topk_ids.shape == (0, 8)


@pytest.mark.parametrize("slices", [(slice(None), slice(3, 35)), (slice(None, None, 2), slice(None)), (None, None)])
def test_strides(kernel, slices):
    """Logits that are part of a larger tensor, or lie the other way round."""
    wide = make_logits("normal", 32, 64)
    logits = wide.T if slices[0] is None else wide[slices]
    compare(kernel, logits, make_plan("xshare"), Router(8))


def test_production_batches_are_one_launch():
    """Up to 16 x 128 in one program, up to 128 x 256 in so few that any GPU holds them together."""
    plan, router = make_plan("xshare"), Router(8)
    assert not make_tile(plan, router, Batch(), 16, 128).several
    for rows, experts in itertools.product((16, 64, 128), (128, 256)):
        tile = make_tile(plan, router, Batch(), rows, experts)
        assert count_programs(tile, plan, Batch(), rows) <= 16


@pytest.mark.parametrize(
    ("keys", "rows", "experts"),
    [
        ({"policy": "moe-spec", "budget": 8, "scope": "request"}, 16, 128),
        ({"policy": "xshare"}, 2048, 128),
        ({"policy": "xshare"}, 16, 513),
    ],
)
def test_what_the_kernel_leaves_to_torch(keys, rows, experts):
    assert not supports(build_plan(keys), Router(8), Batch(), rows, experts)


@pytest.mark.parametrize("router", [Router(32), Router(8, num_expert_group=6, topk_group=2), Router(6, quota_groups=3)])
def test_routers_the_kernel_leaves_to_torch(router):
    assert not supports(make_plan("xshare"), router, Batch(), 16, 96)
    assert supports(make_plan("xshare"), Router(8, num_expert_group=6, topk_group=6), Batch(), 16, 96)


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU: the kernel is compiled for it")
def test_without_a_gpu_it_says_so():
    with pytest.raises(ValueError, match="router_logits on cpu:"):
        select(make_logits("normal", 4, 16), make_plan("xshare"), Router(4), backend="triton")


@pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
@EVERY_PLAN
@pytest.mark.parametrize(("rows", "experts"), [(16, 128), (64, 256)])
@pytest.mark.parametrize("marks", [False, True])
def test_graph_replay(name, rows, experts, marks):
    """A replay reads the logits, `valid` and which rows are exact that are there when it runs, again and again."""
    plan, router, ranks = make_plan(name), Router(8), make_ranks(experts)
    logits = make_logits("normal", rows, experts)
    valid, exact = (torch.ones(rows, dtype=torch.bool, device=DEVICE) for _ in range(2))
    batch = Batch(valid, exact=exact if marks else None)
    select(logits, plan, router, batch, ranks, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = select(logits, plan, router, batch, ranks, backend="triton")
    for seed in range(20):
        logits.copy_(make_logits("ties", rows, experts, seed))
        valid.copy_(torch.arange(rows, device=DEVICE) % (seed + 2) != 1)
        exact.copy_(torch.arange(rows, device=DEVICE) % (seed + 1) == 0)
        graph.replay()
        expected = select(logits, plan, router, batch, ranks, backend="reference")
        for field in EXACT:
            assert torch.equal(getattr(found, field), getattr(expected, field)), (seed, field)
