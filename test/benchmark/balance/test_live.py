"""Expert-parallel ranks, served: the table's arithmetic, and a real server of two ranks that is switched in between.

python -m benchmark.balance.live
"""

import json

import pytest

from benchmark.balance.live import main, tabulate_live

SHAPE = {"ep_size": 4, "batch": 1, "steps": 3, "rounds": 1}


def make_point(fullest, active, kept, nats):
    """Of 10 layers and steps of 2 rows, in which the model's own routing would have used 40 experts, 12 on one."""
    totals = {
        "layer_steps": 10,
        "experts_before": 400,
        "experts_after": 10 * active,
        "kept_mass": 20 * kept,
        "rows": 20,
        "fullest_rank_experts_before": 120,
        "fullest_rank_experts_after": 10 * fullest,
    }
    return {"shape": SHAPE, "totals": totals, "nats": nats}


def test_a_policy_is_set_beside_what_the_model_itself_would_have_used():
    own = make_point(0, 0, 0, [2.0, 2.0]) | {"totals": dict.fromkeys(make_point(0, 0, 0, [])["totals"], 0)}
    table = tabulate_live({"vanilla": own, "one": make_point(6, 20, 0.9, [2.1, 2.1])})
    assert table.rows == [
        ["vanilla", "12.0 (1.00)", "1.20", "40.0", "1.000", "+0.0000"],
        ["one", "6.0 (0.50)", "1.20", "20.0", "0.900", "+0.1000 ± 0.0000"],
    ]
    assert "4 expert-parallel ranks of 16 experts each" in table.note


@pytest.mark.long
def test_a_small_run(tmp_path, capsys):
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
    assert "served" in capsys.readouterr().out
