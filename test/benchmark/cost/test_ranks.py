"""An MoE layer on ranks: what its rows draw, and a small run."""

import json

import torch

from benchmark.cost.ranks import ActiveRouter, main


def test_rows_draw_active_experts_alone_and_all_rounds_are_alike():
    for spread in (True, False):
        router = ActiveRouter(16, 4, spread, 2, period=6)
        ids, weights = router.route(200, seed=1)
        assert set(ids.flatten().tolist()) == ({0, 4, 8, 12} if spread else {0, 1, 2, 3})
        assert all(len(set(row)) == 2 for row in ids.tolist())
        assert weights.sum(1).allclose(torch.ones(200))
        assert router.route(200, seed=7)[0].equal(ids)
        assert not router.route(200, seed=2)[0].equal(ids)


def test_a_small_run(tmp_path, capsys):
    small = ["--experts", "8", "--active", "4", "8", "--hidden", "16", "--width", "32", "--batch", "8", "--rounds", "1"]
    main([*small, "--top-k", "2", "--out", str(tmp_path)])
    points = json.loads((tmp_path / "ranks.json").read_text())["points"]
    assert list(points) == [
        "2 ranks, 8 rows, 4 experts, spread",
        "2 ranks, 8 rows, 4 experts, on the first ranks",
        "2 ranks, 8 rows, 8 experts, spread",
    ]
    assert all(min(point["seconds"].values()) > 0 for point in points.values())
    assert "4 experts, on the first ranks" in capsys.readouterr().out
