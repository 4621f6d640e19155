"""Divergence from the likeliest tokens alone: exact of the whole vocabulary, else a lower bound."""

import pytest
import torch
from torch.nn import functional as F

from benchmark.quality.measure import Top, compare_top, diverge

VOCABULARY = 40


@pytest.fixture
def logits():
    generator = torch.Generator().manual_seed(0)
    vanilla = 3 * torch.randn(4, 6, VOCABULARY, generator=generator)
    return vanilla, vanilla + torch.randn(vanilla.shape, generator=generator)


@pytest.fixture
def exact(logits):
    vanilla, other = (one.double().log_softmax(2) for one in logits)
    return F.kl_div(other, vanilla, reduction="none", log_target=True).sum(2)


def test_of_the_whole_vocabulary_it_is_exact(logits, exact):
    vanilla, other = (Top.of_logits(one, VOCABULARY) for one in logits)
    torch.testing.assert_close(diverge(vanilla, other), exact, rtol=1e-4, atol=1e-5)
    assert compare_top(other, vanilla).nats == pytest.approx(exact.mean().item(), rel=1e-4)


def test_of_fewer_tokens_it_is_a_lower_bound_that_grows(logits, exact):
    bounds = [diverge(*(Top.of_logits(one, count) for one in logits)) for count in (2, 5, 10, 20, VOCABULARY)]
    assert all((bound <= exact + 1e-5).all() for bound in bounds)
    assert all((bound >= -1e-6).all() for bound in bounds)
    means = [bound.mean().item() for bound in bounds]
    assert means == sorted(means)
    assert means[0] < 0.9 * means[-1]


def test_by_hand():
    """Both tell token 3; the other tokens and what is not told are one bucket."""
    reference, other = (
        Top(torch.tensor([[ids]]), torch.tensor([[chances]]).log())
        for ids, chances in (([3, 1], [0.5, 0.3]), ([3, 0], [0.25, 0.6]))
    )
    expected = 0.5 * torch.tensor(0.5 / 0.25).log() + 0.5 * torch.tensor(0.5 / 0.75).log()
    assert diverge(reference, other).item() == pytest.approx(expected.item())
