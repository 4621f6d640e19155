"""Experts in slices and whole ones on 2 and 4 ranks: the outputs of one rank, no row dropped, work that is balanced."""

import pytest
import torch

from benchmark.expert_sharding.layers import Experts, run_alone
from benchmark.expert_sharding.ranks import Encoder, Router, activate, measure, skew
from benchmark.expert_sharding.report import balance

SMALL = {"sequence": 6, "layers": 2, "hidden": 16, "width": 32}


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_rows_draw_experts_with_the_papers_odds(alpha):
    odds = torch.tensor([0.05 + alpha] * 2 + [0.05] * 18)
    router = Router(skew(20, 2, alpha))
    ids, weights = router.route(40_000, seed=1)
    drawn = torch.bincount(ids.flatten(), minlength=20) / len(ids)
    torch.testing.assert_close(drawn, odds / odds.sum(), atol=0.01, rtol=0)
    assert (weights == 1).all()
    assert router.route(5, seed=1)[0].equal(ids[:5])


def test_rows_draw_active_experts_alone_and_all_rounds_are_alike():
    for spread in (True, False):
        router = Router(activate(16, 4, spread), 2, period=6)
        ids, weights = router.route(200, seed=1)
        assert set(ids.flatten().tolist()) == ({0, 4, 8, 12} if spread else {0, 1, 2, 3})
        assert all(len(set(row)) == 2 for row in ids.tolist())
        assert weights.sum(1).allclose(torch.ones(200))
        assert router.route(200, seed=7)[0].equal(ids)
        assert not router.route(200, seed=2)[0].equal(ids)


def test_one_rank_computes_each_expert_by_itself():
    experts = Experts.draw(4, 8, 12)
    rows, ids, weights = torch.randn(10, 8), torch.randint(4, (10, 2)), torch.rand(10, 2)
    wanted = torch.zeros_like(rows)
    for row, slots in enumerate(ids.tolist()):
        for slot, expert in enumerate(slots):
            gate, up = (rows[row] @ experts.up[expert]).chunk(2)
            wanted[row] += weights[row, slot] * (torch.nn.functional.silu(gate) * up) @ experts.down[expert]
    torch.testing.assert_close(run_alone(experts, rows, ids, weights), wanted)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("alpha", "top_k"), [(0.0, 1), (2.0, 1), (0.6, 2)])
def test_layouts_compute_what_one_rank_does(ranks, alpha, top_k):
    """With every row of some rank elsewhere, too: at alpha 2 the other ranks' experts get almost none."""
    found = measure(Encoder(Router(skew(8, 1, alpha), top_k), 8, **SMALL), ranks, rounds=2)
    rows = 8 * SMALL["sequence"] * top_k
    for layout in found.values():
        assert layout["difference"] < 1e-5
        assert (layout["dropped"], sum(layout["work"])) == (0, rows * SMALL["width"])
        assert len(layout["ttft_ms"]) == len(layout["layer_ms"]) == 2
        assert min(layout["ttft_ms"]) > min(layout["layer_ms"]) > 0
    assert balance(found["shard"]["work"]) == 1
    assert found["ep"]["work"] == found["ep, all-to-all"]["work"]
    assert balance(found["ep"]["work"]) > (1.5 if alpha == 2 else 1)
