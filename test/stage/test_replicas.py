"""Experts with replicas: which physical experts upstream's dispatch makes of a selection, empty slots included."""

import pytest
import torch
from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo, topk_ids_logical_to_physical

from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.types import RunnerSlots

ROWS, PADDING, EXPERTS, REPLICAS, TOP_K = 12, 4, 16, 3, 4


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
