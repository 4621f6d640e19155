"""`python -m benchmark.neighbours`: what differs alone and beside others, of answers made by hand; and a small run."""

import pytest

from benchmark import neighbours
from benchmark.common.record import read_record
from benchmark.common.variant import BASELINE

POLICY = "xshare:k0=1,add=6"
SIZES = ["--prompts", "3", "--others", "4", "--prompt", "4", "--tokens", "3"]


def test_the_table_has_a_row_a_policy():
    shape = {"prompts": 4, "others": 12, "prompt": 8, "tokens": 16}
    points = {
        "vanilla": {"shape": shape, "first_differences": [None] * 4, "alone_unlike_vanilla": 0},
        "oea:k0=3": {"shape": shape, "first_differences": [3, None, 9, 5], "alone_unlike_vanilla": 1},
    }
    table = neighbours.tabulate_neighbours(points)
    assert table.rows == [["vanilla", "0 of 4", "-", "0 of 4"], ["oea:k0=3", "3 of 4", "5", "1 of 4"]]
    assert "one batch with 12 others" in table.note.replace("\n", " ")


@pytest.mark.long
def test_a_small_run_is_vanilla_alone(tmp_path):
    neighbours.main([POLICY, *SIZES, "--out", str(tmp_path)])
    points = read_record(tmp_path / "neighbours.json", "neighbours")["points"]
    assert points[BASELINE]["first_differences"] == [None] * 3
    assert points[POLICY]["alone_unlike_vanilla"] == 0
