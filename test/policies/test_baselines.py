"""Vanilla, pruning and dynamic skipping on batches small enough to work out by hand."""

import pytest
import torch

from policies.batches import logits_of
from sglang_xshare import Router, build_plan, select

BATCH = logits_of([8, 4, 2, 1, 1], [1, 3, 1, 9, 2])


def test_vanilla_keeps_everything():
    out = select(BATCH, build_plan("vanilla"), Router(3))
    assert out.topk_ids.tolist() == [[0, 1, 2], [3, 1, 4]]
    assert out.topk_weights[0].tolist() == pytest.approx([8 / 14, 4 / 14, 2 / 14])
    assert out.kept_mass.tolist() == [1, 1]


def test_pruned_rows_have_only_their_own_best():
    out = select(BATCH, build_plan("pruned", k0=2), Router(3))
    assert out.topk_ids.tolist() == [[0, 1, -1], [3, 1, -1]]
    assert out.topk_weights[0].tolist() == pytest.approx([8 / 12, 4 / 12, 0])
    assert out.kept_mass.tolist() == pytest.approx([12 / 14, 12 / 14])
    assert select(BATCH, build_plan("pruned", k0=3, p=0.45), Router(3)).topk_ids.tolist() == [[0, -1, -1], [3, -1, -1]]


def test_dynamic_skip_compares_with_the_first():
    """Scores relative to the first: 1, 1/2, 1/4 and 1, 1/3, 2/9."""
    assert select(BATCH, build_plan("dynamic-skip", beta=0.4), Router(3)).topk_ids.tolist() == [[0, 1, -1], [3, -1, -1]]
    assert select(BATCH, build_plan("dynamic-skip", beta=0.2), Router(3)).topk_ids.tolist() == [[0, 1, 2], [3, 1, 4]]
    assert select(BATCH, build_plan("dynamic-skip", beta=1), Router(3)).topk_ids.tolist() == [[0, -1, -1], [3, -1, -1]]


def test_dynamic_skip_keeps_what_is_exactly_at_the_threshold():
    assert select(torch.zeros(1, 4), build_plan("dynamic-skip", beta=1), Router(3)).topk_ids.tolist() == [[0, 1, 2]]


def test_dynamic_skip_closes_the_gap_it_leaves():
    """With a bias the second choice can score less than the third."""
    logits = torch.tensor([[2.0, 0.0, 1.5, -9.0]])
    router = Router(3, "sigmoid", torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert select(logits, build_plan("dynamic-skip", beta=0.7), router).topk_ids.tolist() == [[0, 2, -1]]
