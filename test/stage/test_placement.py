"""Which rank holds which expert, read from a server's arguments, its model's configuration and upstream's map."""

from types import SimpleNamespace

import pytest
import torch

from sglang_xshare.stage import placement
from sglang_xshare.stage.placement import read_placement

LAYERS = 4


@pytest.fixture
def read(monkeypatch):
    """Call it with a number of experts and of ranks, and upstream's map of places if it has one, for the placement."""

    def find(num_experts: int, ranks: int, locations: torch.Tensor | None = None):
        config = SimpleNamespace(num_experts=num_experts, num_experts_per_tok=2)
        model = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"]),
            hf_text_config=config,
            num_hidden_layers=LAYERS,
        )
        monkeypatch.setattr(placement, "model_config", lambda server_args: model)
        monkeypatch.setattr(placement, "expert_locations", lambda config: locations)
        server_args = SimpleNamespace(ep_size=ranks, model_path="path", ep_num_redundant_experts=0)
        return read_placement(SimpleNamespace(device="cpu", server_args=server_args))

    return find


@pytest.mark.parametrize(
    ("experts", "ranks", "rank_of_expert"),
    [(8, 2, [0, 0, 0, 0, 1, 1, 1, 1]), (6, 3, [0, 0, 1, 1, 2, 2]), (4, 4, [0, 1, 2, 3])],
)
def test_ranks_hold_contiguous_blocks(read, experts, ranks, rank_of_expert):
    assert all(read(experts, ranks).rank_of_expert(layer).tolist() == rank_of_expert for layer in range(LAYERS))


def test_experts_that_upstream_moves_are_followed(read):
    locations = torch.arange(6).expand(LAYERS, -1).clone()
    found = read(6, 3, locations)
    assert found.rank_of_expert(1).tolist() == [0, 0, 1, 1, 2, 2]
    locations[1] = torch.tensor([5, 4, 3, 2, 1, 0])  # in place, as upstream rebalances
    assert found.rank_of_expert(1).tolist() == [2, 2, 1, 1, 0, 0]
    assert found.rank_of_expert(2).tolist() == [0, 0, 1, 1, 2, 2]
