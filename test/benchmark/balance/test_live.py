"""Expert-parallel ranks, served: a real server of two ranks that is switched in between.

python -m benchmark.balance.live
"""

import json

import pytest

from benchmark.balance.live import main


@pytest.mark.long
def test_a_small_run(tmp_path):
    small = ["--ep-size", "2", "--rounds", "2", "--batch", "4", "--steps", "6", "--out", str(tmp_path)]
    main(["xshare:k0=1,target_per_rank=5,balance=fill", *small])
    points = json.loads((tmp_path / "live.json").read_text())["points"]
    vanilla, filled = points.values()
    assert vanilla["totals"]["layer_steps"] == 0
    totals = filled["totals"]
    assert totals["layer_steps"] == 2 * 6 * 4  # rounds, steps, layers
    assert totals["rows"] == 4 * totals["layer_steps"]
    assert 5 <= totals["fullest_rank_experts_after"] / totals["layer_steps"] < 8
    assert totals["fullest_rank_experts_before"] > totals["fullest_rank_experts_after"]
    assert len(vanilla["nats"]) == len(filled["nats"]) == 8
    assert filled["nats"] != vanilla["nats"]
