"""Shares that are reached exactly: the expert with which S or a row reaches a share is its last, on every backend."""

import pytest
import torch

from sglang_xshare import Router, build_plan, select
from sglang_xshare.selection.cpu_call import load

BACKENDS = ["reference", "torch", *(["cpu"] if load() is not None else [])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("policy", "keys", "experts"),
    [
        ("xshare", {"k0": 0, "mass": 0.25}, 1),
        ("xshare", {"k0": 0, "mass": 0.5}, 2),
        ("xshare", {"k0": 0, "mass": 0.50001}, 3),
        ("xshare", {"k0": 4, "p": 0.125, "add": 0}, 1),
        ("xshare", {"k0": 4, "p": 0.25, "add": 0}, 2),
        ("xshare", {"k0": 4, "p": 0.25001, "add": 0}, 3),
        ("dynamic-skip", {"beta": 1}, 4),
    ],
)
def test_equal_scores_reach_a_share_with_a_whole_number_of_experts(policy, keys, experts, backend):
    """Each of a row's top 4 has an eighth of its score and a quarter of its utility."""
    found = select(torch.zeros(3, 8), build_plan(policy, **keys), Router(4), backend=backend)
    assert found.selected.nonzero().flatten().tolist() == list(range(experts))
