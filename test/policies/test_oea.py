"""OEA, Algorithm 2, on batches small enough to work out by hand."""

import pytest
import torch

from policies.batches import logits_of
from sglang_xshare import Router, build_plan, select

# Rankings: row 0: 0 1 2 3 4 5; row 1: 5 4 3 2 1 0; row 2: 2 0 1 3 4 5.
BATCH = logits_of([32, 16, 8, 4, 2, 2], [2, 2.5, 4, 8, 16, 32], [16, 8, 32, 4, 2, 1])


def ids(logits=BATCH, top_k=3, **keys):
    return select(logits, build_plan("oea", **keys), Router(top_k)).topk_ids.tolist()


def test_rows_piggyback_on_experts_that_others_use():
    """The base is {0, 2, 5}. A row gets exactly top_k, as the paper's text says, not one more as in its break test."""
    assert ids(k0=1) == [[0, 2, 5], [5, 2, 0], [2, 0, 5]]


def test_kmax_beside_the_models_top_k():
    assert ids(k0=1, kmax=2) == [[0, 2], [5, 2], [2, 0]]
    assert ids(k0=1, kmax=5) == [[0, 2, 5, -1, -1], [5, 2, 0, -1, -1], [2, 0, 5, -1, -1]]
    assert ids(k0=3, kmax=4)[0] == [0, 1, 2, 3]


def test_max_rank_limits_how_far_a_row_goes_down_its_ranking():
    assert ids(k0=1, max_rank=3) == [[0, 2, -1], [5, -1, -1], [2, 0, -1]]
    assert ids(k0=1, max_rank=1) == [[0, -1, -1], [5, -1, -1], [2, -1, -1]]
    assert ids(k0=2, max_rank=1) == [[0, 1, -1], [5, 4, -1], [2, 0, -1]]


def test_ranks_with_fewer_active_use_as_many_as_the_fullest():
    """The base is {0, 2, 5}: two experts of rank 0. Rank 1 adds 4, the second choice of row 1, at no longer a wait."""
    ranks = [0, 0, 0, 1, 1, 1]
    out = select(BATCH, build_plan("oea", k0=1, target_per_rank=1), Router(3), rank_of_expert=ranks)
    assert out.selected.nonzero().flatten().tolist() == [0, 2, 4, 5]
    assert out.topk_ids.tolist() == [[0, 2, 4], [5, 4, 2], [2, 0, 4]]
    out = select(BATCH, build_plan("oea", k0=1, target_per_rank=3), Router(3), rank_of_expert=ranks)
    assert out.selected.all()


@pytest.mark.parametrize(("p", "kept"), [(0.25, 1), (0.2501, 2), (0.5, 2), (0.75, 3), (0.99, 3), (1.0, 3)])
def test_p_ends_a_warm_up_with_the_expert_that_reaches_it(p, kept):
    """Four experts of a quarter each: one is exactly a quarter. At most k0 = 3."""
    out = select(torch.zeros(1, 4), build_plan("oea", k0=3, p=p), Router(4))
    assert out.selected.tolist() == [i < kept for i in range(4)]


def test_p_looks_at_the_share_of_all_experts_also_for_a_sigmoid():
    """Scores 0.5 each: one of eight experts is an eighth of the row, though its score is a half."""
    out = select(torch.zeros(1, 8), build_plan("oea", k0=4, p=0.25), Router(4, "sigmoid"))
    assert out.selected.sum() == 2


def test_weights_are_the_models_own_renormalized():
    out = select(BATCH, build_plan("oea", k0=1), Router(3))
    assert out.topk_weights[0].tolist() == pytest.approx([32 / 42, 8 / 42, 2 / 42])
    out = select(BATCH, build_plan("oea", k0=1), Router(3, renormalize=False))
    assert out.topk_weights[0].tolist() == pytest.approx([32 / 64, 8 / 64, 2 / 64])
