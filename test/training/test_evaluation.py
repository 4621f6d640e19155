"""What is measured on held-out text, against counting by hand."""

import pytest
import torch

from training.evaluation import CONTEXT, STRIDE, experts_active, windows


@pytest.mark.parametrize("length", [2, 255, 256, 257, 1000])
def test_windows_score_every_token_but_the_first_once(length: int) -> None:
    ids = torch.arange(length)
    scored = torch.cat([window[-new:] for window, new in windows(ids)])
    assert scored.tolist() == list(range(1, length))
    for window, new in windows(ids):
        assert len(window) <= CONTEXT
        assert window[0] == 0 or len(window) - new >= CONTEXT - STRIDE


def test_experts_active_counts_different_experts() -> None:
    same = torch.tensor([[[0, 1]] * 50, [[2, 3]] * 50])
    assert experts_active(same, batch=4) == [2, 2]
    apart = torch.arange(100).view(1, 50, 2)
    draws = experts_active(apart, batch=16, batches=2000)[0]
    assert draws == pytest.approx(100 * (1 - (1 - 1 / 50) ** 16), rel=0.01)
