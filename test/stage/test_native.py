"""Upstream's native MoE loop as the queue leaves it: repeated ids of a row, and ids of -1."""

import pytest
import torch

from stage.contracts import run_native

EXPERTS, HIDDEN, WIDTH, ROWS, TOP_K = 8, 6, 4, 5, 3


W1, W2 = (
    torch.randn(EXPERTS, *shape, generator=torch.Generator().manual_seed(0))
    for shape in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
)


def run(rows, ids, weights, first=0, count=EXPERTS):
    """The loop over experts `first` to `first + count`."""
    here = slice(first, first + count)
    return run_native(rows, ids, weights, W1[here], W2[here])


def make_batch():
    rows, weights = torch.randn(ROWS, HIDDEN), torch.rand(ROWS, TOP_K)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(ROWS)]).int()
    return rows, ids, weights


def test_ids_with_a_stride():
    rows, ids, weights = make_batch()
    strided = torch.stack([ids, torch.full_like(ids, -1)], -1).flatten(1)[:, ::2]
    assert not strided.is_contiguous()
    torch.testing.assert_close(run(rows, strided, weights), run(rows, ids, weights))


def test_a_repeated_id_of_weight_0_adds_nothing():
    rows, ids, weights = make_batch()
    filled, without = ids.clone(), weights.clone()
    filled[:, 2] = ids[:, 0]
    without[:, 2] = 0
    torch.testing.assert_close(run(rows, filled, without), run(rows, ids, without))


def test_repeated_ids_add_their_weights():
    rows, ids, weights = make_batch()
    ids[:, 1] = ids[:, 0]
    together = torch.stack([weights[:, 0] + weights[:, 1], torch.zeros(ROWS), weights[:, 2]], 1)
    torch.testing.assert_close(run(rows, ids, weights), run(rows, ids, together))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_that_leave_out_the_experts_of_others_add_up_to_one(ranks):
    rows, ids, weights = make_batch()
    ids[0] = torch.tensor([0, 1, 2])  # of the last rank, no row has any
    ids = ids.clamp(max=EXPERTS - EXPERTS // ranks - 1)
    share, total = EXPERTS // ranks, torch.zeros(ROWS, HIDDEN)
    for rank in range(ranks):
        own = (ids // share == rank).int()
        local = torch.where(own.bool(), ids - rank * share, -1)
        total += run(rows, local, weights, rank * share, share)
    torch.testing.assert_close(total, run(rows, ids, weights))


def test_a_row_without_experts_is_zero():
    rows, ids, weights = make_batch()
    ids[2] = -1
    assert (run(rows, ids, weights)[2] == 0).all()
    assert (run(rows, torch.full_like(ids, -1), weights) == 0).all()
