"""Which rank holds which expert, by a server's arguments, its model's configuration and upstream's map; replicas."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo, topk_ids_logical_to_physical

from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.compatibility import layers
from sglang_xshare.stage.layer import Layer
from sglang_xshare.stage.placement import Placement
from sglang_xshare.stage.step import Step
from sglang_xshare.types import RunnerSlots
from stage.fake import Config, put_in_step

LAYERS = 4


@pytest.fixture
def read(monkeypatch):
    """Call it with a number of experts and of ranks, and upstream's map of places if it has one, for the placement."""

    def find(num_experts: int, ranks: int, locations: torch.Tensor | None = None, redundant: int = 0):
        config = SimpleNamespace(num_experts=num_experts, num_experts_per_tok=2)
        whole = SimpleNamespace(architectures=["Qwen3MoeForCausalLM"])
        model = SimpleNamespace(hf_config=whole, hf_text_config=config, num_hidden_layers=LAYERS)
        monkeypatch.setattr(layers, "model_config", lambda server_args: model)
        monkeypatch.setattr(layers, "expert_locations", lambda config: locations)
        server_args = SimpleNamespace(ep_size=ranks, model_path="path", ep_num_redundant_experts=redundant)
        return layers.read_placement(SimpleNamespace(device="cpu", server_args=server_args))

    return find


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant", "rank_of_expert"),
    [(8, 2, 0, [0, 0, 0, 0, 1, 1, 1, 1]), (6, 3, 0, [0, 0, 1, 1, 2, 2]), (6, 2, 2, [0, 0, 0, 0, 1, 1])],
)
def test_ranks_hold_contiguous_blocks(read, experts, ranks, redundant, rank_of_expert):
    """The placement covers all physical experts. Redundant experts come after the others."""
    found = read(experts, ranks, redundant=redundant)
    assert all(found.rank_of_expert(layer).tolist() == rank_of_expert for layer in range(LAYERS))


def test_experts_that_upstream_moves_are_followed(read):
    locations = torch.arange(6).expand(LAYERS, -1).clone()
    found = read(6, 3, locations)
    assert found.rank_of_expert(1).tolist() == [0, 0, 1, 1, 2, 2]
    locations[1] = torch.tensor([5, 4, 3, 2, 1, 0])  # in place, as upstream rebalances
    assert found.rank_of_expert(1).tolist() == [2, 2, 1, 1, 0, 0]
    assert found.rank_of_expert(2).tolist() == [0, 0, 1, 1, 2, 2]


ROWS, PADDING, EXPERTS, REPLICAS, TOP_K = 12, 4, 16, 3, 4


def test_a_layer_selects_by_the_ranks_of_its_own_id():
    """Not of its place among the MoE layers, before which dense ones may lie. The second step has a kept call."""
    expert = torch.arange(EXPERTS)
    others, own = expert, expert % 4 * 4 + expert // 4  # the best four experts lie on one rank, or each on one of four
    layer = Layer(1, Config(), Placement(4, 4, torch.stack([others, own])))
    plan, logits = build_plan("xshare", k0=1, target_per_rank=1, balance="fill"), -expert.float().repeat(6, 1)
    for _ in range(2):
        put_in_step(layer, plan, Step("decode", 6, Batch()))
        _, ids = layer.choose(logits, logits, TOP_K, True)
        assert ids.tolist() == [[0, 1, 2, 3]] * 6


def dispatch(algorithm: str, rank_invariant: bool = True) -> ExpertLocationDispatchInfo:
    """Of experts with one to three replicas, in turn."""
    counts = torch.arange(EXPERTS) % REPLICAS + 1
    physical = torch.full((EXPERTS, REPLICAS), -1)
    present = torch.arange(REPLICAS) < counts[:, None]
    physical[present] = torch.arange(int(counts.sum()))
    return ExpertLocationDispatchInfo(algorithm, physical[:, 0], physical, counts, int(counts.sum()), rank_invariant)


def find_routed(info: ExpertLocationDispatchInfo, padding: int) -> tuple[set[int], set[int]]:
    """Physical experts in (slots that weigh something, all slots), over ten batches that leave slots empty."""
    used, routed = set(), set()
    for seed in range(10):
        torch.manual_seed(seed)
        batch = Batch(valid=torch.arange(ROWS) < ROWS - padding)
        plan = build_plan("pruned", k0=2)
        out = select(torch.randn(ROWS, EXPERTS), plan, Router(TOP_K), batch, slots=RunnerSlots())
        physical = topk_ids_logical_to_physical(out.topk_ids, info) + seed * info.num_physical_experts
        assert (out.topk_weights == 0).any()
        used |= set(physical[out.topk_weights > 0].tolist())
        routed |= set(physical.flatten().tolist())
    return used, routed


@pytest.mark.parametrize("padding", [0, PADDING])
def test_static_dispatch_uses_no_other_replica(padding):
    used, routed = find_routed(dispatch("static"), padding)
    assert routed == used


def test_dispatch_by_row_uses_no_other_replica_for_a_request():
    """An empty slot repeats the row's own first expert, and so its replica."""
    used, routed = find_routed(dispatch("dynamic"), 0)
    assert routed == used


@pytest.mark.parametrize(("rank_invariant", "padding"), [(True, PADDING), (False, 0)])
def test_why_dispatch_that_depends_on_the_row_is_refused(rank_invariant, padding):
    """By row, padding uses other replicas; drawn at random, every empty slot does."""
    used, routed = find_routed(dispatch("dynamic", rank_invariant), padding)
    assert routed > used
