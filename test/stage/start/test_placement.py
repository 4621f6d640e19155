"""Which rank holds which expert, read from a server's arguments and its model's configuration."""

from types import SimpleNamespace

import pytest

from sglang_xshare.stage.start import placement
from sglang_xshare.stage.start.placement import read_placement


@pytest.fixture
def read(monkeypatch):
    """Call it with a number of experts and of ranks for the placement."""

    def find(num_experts: int, ranks: int):
        config = SimpleNamespace(num_experts=num_experts, num_experts_per_tok=2)
        model = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"]), hf_text_config=config, num_hidden_layers=4
        )
        monkeypatch.setattr(placement, "model_config", lambda server_args: model)
        return read_placement(
            SimpleNamespace(device="cpu", server_args=SimpleNamespace(ep_size=ranks, model_path="path"))
        )

    return find


def test_one_rank_needs_none(read):
    assert read(8, ranks=1) is None


@pytest.mark.parametrize(
    ("experts", "ranks", "rank_of_expert"),
    [(8, 2, [0, 0, 0, 0, 1, 1, 1, 1]), (6, 3, [0, 0, 1, 1, 2, 2]), (4, 4, [0, 1, 2, 3])],
)
def test_ranks_hold_contiguous_blocks(read, experts, ranks, rank_of_expert):
    assert read(experts, ranks).tolist() == rank_of_expert


def test_every_expert_has_a_rank(read):
    found = read(128, 8)
    assert found.shape == (128,)
    assert found.bincount().tolist() == [16] * 8
