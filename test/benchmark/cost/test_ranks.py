"""An MoE layer on ranks: what its rows draw, and a small run."""

import torch

from benchmark.cost.ranks import ActiveRouter


def test_rows_draw_active_experts_alone_and_all_rounds_are_alike():
    for spread in (True, False):
        router = ActiveRouter(16, 4, spread, 2, period=6)
        ids, weights = router.route(200, seed=1)
        assert set(ids.flatten().tolist()) == ({0, 4, 8, 12} if spread else {0, 1, 2, 3})
        assert all(len(set(row)) == 2 for row in ids.tolist())
        assert weights.sum(1).allclose(torch.ones(200))
        assert router.route(200, seed=7)[0].equal(ids)
        assert not router.route(200, seed=2)[0].equal(ids)
