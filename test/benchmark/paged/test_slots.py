"""A paged layer against plain lists: what is resident, what is paged in, and what selection is told."""

import pytest
import torch

from benchmark.paged.slots import PagedLayer
from sglang_xshare import Batch, Router, build_plan

EXPERTS, TOP_K, ROWS, STEPS = 16, 4, 3, 20
ROUTER = Router(TOP_K)
PLAN = build_plan("xshare", k0=1, add=1, utility="squared", own_share=0.75)


def draw(seed=0):
    """Router logits of some steps that agree in part."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(1, 1, EXPERTS, generator=generator)
    return common + torch.randn(STEPS, ROWS, EXPERTS, generator=generator)


@pytest.mark.parametrize("plan", [build_plan("vanilla"), PLAN])
def test_recency_keeps_what_was_used_last(plan):
    slots = 12  # as many as three rows take
    layer = PagedLayer(slots)
    used = list(reversed(range(slots, EXPERTS))) + list(range(slots))  # the latest last
    for logits in draw():
        residents = used[-slots:]
        found = layer(logits, plan, ROUTER, Batch())
        active = found.active.nonzero().flatten().tolist()
        missing = [expert for expert in active if expert not in residents]
        vanilla = set(logits.topk(TOP_K).indices.flatten().tolist())
        assert layer.page_ins[-1] == len(missing)
        assert layer.page_ins_before[-1] == len(vanilla - set(residents))
        used = [expert for expert in used if expert not in active]
        used += [expert for expert in active if expert in residents] + missing


def test_selection_prefers_what_is_loaded():
    layer, blind = (PagedLayer(8) for _ in range(2))
    told = build_plan("xshare", k0=1, add=4, free_residents=False, utility="squared", own_share=0.75)
    for logits in draw():
        found = layer(logits, PLAN, ROUTER, Batch())
        assert found.active.sum() <= 8
        blind(logits, told, ROUTER, Batch())
    assert sum(layer.page_ins) < sum(blind.page_ins)


def test_slots_for_all_page_nothing_in_and_change_nothing():
    layer = PagedLayer(EXPERTS)
    for logits in draw():
        found = layer(logits, PLAN, ROUTER, Batch())
        assert torch.equal(found.topk_ids.long(), logits.topk(TOP_K).indices)
    assert layer.page_ins == layer.page_ins_before == [0] * STEPS
