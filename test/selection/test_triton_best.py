"""The Triton kernel's choice of the best experts, as functions of their own, beside a sort."""

import pytest
import torch

from selection.best import keep
from selection.compared import DEVICE

LARGEST = 2**31 - 1
KEYS = {
    "any": lambda draw: torch.randint(0, 2**26, (64,), generator=draw),
    "equal": lambda draw: torch.full((64,), 21),
    "near": lambda draw: 48 + torch.randperm(64, generator=draw) % 7,  # several in the range of the last digit but one
    "two in a range": lambda draw: 1 + 8 * torch.randperm(64, generator=draw),  # of the last digit
    "ties": lambda draw: torch.randint(13, 16, (64,), generator=draw),
    "none": lambda draw: torch.zeros(64, dtype=torch.int64),
    "few": lambda draw: torch.where(torch.arange(64) > 0, 7, 15),  # one of the largest digit
    "of 31 bits": lambda draw: LARGEST - torch.randint(0, 3, (64,), generator=draw),
    "of 48 bits": lambda draw: torch.randint(0, 2**48, (64,), generator=draw) >> 46 << 46,
}


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("weighed", [False, True])
def test_the_best_until_they_weigh_enough(run, name, weighed):
    """Whether each counts as one, or as much as its key; some of those that weigh are not to be had any more."""
    draw = torch.Generator().manual_seed(len(name))
    keys = KEYS[name](draw)
    keys = keys.to(torch.int64 if name == "of 48 bits" else torch.int32)
    weights = keys.long() if weighed else torch.ones_like(keys, dtype=torch.int32)
    keys[1:] *= torch.rand(63, generator=draw) > 0.3
    order = keys.long().sort(descending=True, stable=True).indices
    before = weights[order].cumsum(0) - weights[order]
    total = int(weights[keys > 0].sum())
    for limit in {-5, 0, 1, total // 3, total // 2, total, total + 1}:
        for most in (None, 3, 40):
            expected = torch.zeros(64, dtype=torch.bool)
            expected[order] = (before < limit) & (keys[order] > 0) & (torch.arange(64) < (64 if most is None else most))
            found = run(keep, keys.to(DEVICE), weights.to(DEVICE), limit, most)
            assert torch.equal(found.cpu(), expected), (limit, most)
