"""Slots as MoE runners take them: none empty, no expert more active. test_backends.py has them of every backend."""

import pytest
import torch

from sglang_xshare.selection.slots import drop_slots, fill_slots, find_filler, refill_slots


@pytest.mark.parametrize(
    ("ids", "filler", "filled"),
    [
        ([[3, 1], [2, 0]], 0, [[3, 1], [2, 0]]),
        ([[3, -1, -1], [0, 5, -1]], 0, [[3, 3, 3], [0, 5, 0]]),
        ([[-1, -1], [2, 6], [4, -1]], 6, [[6, 6], [2, 6], [4, 4]]),
        ([[1, 2, 3, 4, -1], [5, 6, -1, -1, -1]], 0, [[1, 2, 3, 4, 1], [5, 6, 5, 5, 5]]),
    ],
    ids=["full rows", "the row's own first expert", "of padding the one that fills", "a plan's kmax"],
)
def test_what_fills_an_empty_slot(ids, filler, filled):
    found = fill_slots(torch.tensor(ids, dtype=torch.int32), torch.tensor(filler, dtype=torch.int32))
    assert (found.dtype, found.tolist()) == (torch.int32, filled)


@pytest.mark.parametrize(
    ("selected", "vanilla_active", "active", "filler"),
    [
        ([2, 5, 6], [1, 2, 5], [2, 5, 6], 5),
        ([2, 5, 6], [1, 2, 5], [2, 6], 2),
        ([5, 6], [1, 2], [1, 2], 2),
        ([5], [], [], 0),
        ([0], [0], [0], 0),
    ],
    ids=["the largest of S and of a top-k", "that a row uses", "that a row uses at all", "no live row", "the first"],
)
def test_which_expert_fills(selected, vanilla_active, active, filler):
    tables = torch.zeros(3, 7, dtype=torch.bool)
    for table, experts in zip(tables, (selected, vanilla_active, active), strict=True):
        table[experts] = True
    assert find_filler(*tables).tolist() == filler


def test_slots_of_weight_0_are_dropped():
    ids = torch.tensor([[3, 1, 3], [2, 2, 2], [7, 4, 7]], dtype=torch.int32)
    weights = torch.tensor([[0.6, 0.4, 0.0], [0.0, -0.0, 0.0], [torch.nan, 1e-45, 0.0]])
    dropped = drop_slots(ids, weights)
    assert (dropped.dtype, dropped.tolist()) == (torch.int32, [[3, 1, -1], [-1, -1, -1], [7, 4, -1]])


def test_slots_are_filled_anew_from_places_in_use():
    """Row 1 has no expert of its own; what it was filled with has become place 9, which no other row uses."""
    ids = torch.tensor([[3, 1, 3], [9, 9, 9], [5, 5, 6]], dtype=torch.int32)
    weights = torch.tensor([[0.6, 0.4, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert refill_slots(ids, weights).tolist() == [[3, 1, 3], [6, 6, 6], [6, 6, 6]]
    assert refill_slots(ids, weights * 0).tolist() == [[0] * 3] * 3, "as when a graph is captured"
    assert refill_slots(ids[:0], weights[:0]).shape == (0, 3)
    ids[1] = -1  # of a row that upstream takes for padding
    assert refill_slots(ids, weights)[1].tolist() == [6, 6, 6]
