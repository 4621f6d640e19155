"""`python -m benchmark.neighbours`: what differs alone and beside others, of answers made by hand; and a small run."""

import pytest

from benchmark import neighbours
from benchmark.common.record import read_record
from benchmark.common.variant import BASELINE

POLICY = "xshare:k0=1,add=6"
SIZES = ["--prompts", "3", "--others", "4", "--prompt", "4", "--tokens", "3"]


class FakeServer:
    """Under a policy the second token of a prompt that begins with an even id is another beside others."""

    def __init__(self, *_, **__):
        self.policy = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def post(self, path, body):
        assert path == "/expert_policy"
        self.policy = body["policy"]

    def generate(self, prompts, max_new_tokens, ignore_eos):
        assert ignore_eos
        changed = self.policy == "xshare" and len(prompts) == 5
        second = (1 if changed and prompt[0] % 2 == 0 else 0 for prompt in prompts)
        return [
            {"output_ids": [prompt[0], other, 9][:max_new_tokens]}
            for prompt, other in zip(prompts, second, strict=True)
        ]


def test_it_counts_the_answers_that_differ_and_tells_where(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(neighbours, "Server", FakeServer)
    neighbours.main([POLICY, *SIZES, "--out", str(tmp_path)])
    points = read_record(tmp_path / "neighbours.json", "neighbours")["points"]
    assert list(points) == [BASELINE, POLICY]
    assert points[BASELINE]["first_differences"] == [None] * 3
    sequences = neighbours.load_sequences(neighbours.TEXTS, neighbours.TRAINED, 4, 2)
    firsts = sequences.take(sequences.mixing()).tokens[:3, 0].tolist()
    assert points[POLICY]["first_differences"] == [None if first % 2 else 2 for first in firsts]
    assert [point["alone_unlike_vanilla"] for point in points.values()] == [0, 0]


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
