"""Shares of accepted drafts: counted, smoothed, and what follows of them."""

import random

import pytest

from depth.simulation import BADLY, WELL, Traffic, costs
from sglang_xshare.depth.shares import MEMORY, Shares

FREE = costs(1.0, 0.0)


def count(shares: Shares, traffic: Traffic, depths: list[int], seed: int = 0) -> Shares:
    drawn = random.Random(seed)
    for depth in depths:
        shares.count(depth, traffic.accept(depth, drawn))
    return shares


def test_a_share_counts_requests_whose_drafts_before_it_were_accepted():
    shares = Shares(4)
    shares.count(3, [0, 1, 1, 3])  # tried: 4, 3, 1; accepted: 3, 1, 1
    first = 3 / 4
    second = (1 + 0.5 * first) / 3.5
    third = (1 + 0.5 * second) / 1.5
    assert shares.shares == pytest.approx([first, second, third, third]), "beyond the deepest seen the last share"
    assert shares.expect()[:3] == pytest.approx([1, 1 + first, 1 + first + first * second])


@pytest.mark.parametrize("deepest", [3, 0])
def test_before_the_first_draft_every_draft_is_taken_as_accepted(deepest):
    """Without candidates that draft there is nothing to count."""
    shares = Shares(deepest)
    shares.count(0, [0, 0])
    tokens = [1.0, 2.0, 3.0, 4.0][: deepest + 1]
    assert (shares.shares, shares.expect(), shares.pooled) == ([1.0] * deepest, tokens, None)


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize("chances", [WELL, BADLY, (1.0,), (0.0,)])
def test_shares_of_simulated_chains_are_found_again(chances, requests):
    traffic = Traffic(requests, chances, FREE)
    shares = count(Shares(7), traffic, [7] * 600)
    for depth in (1, 3, 7):
        assert shares.expect()[depth] == pytest.approx(traffic.tokens(depth), rel=0.25 if requests == 1 else 0.06)


def test_shares_do_not_depend_on_the_depth_that_is_used():
    """The mean accepted length does."""
    traffic = Traffic(16, (0.8, 0.5, 0.5), FREE)
    deep, mixed = count(Shares(7), traffic, [7] * 400), count(Shares(7), traffic, [1, 3, 7, 0] * 100)
    assert deep.shares[:3] == pytest.approx(mixed.shares[:3], abs=0.06)
    alike = Traffic(16, (0.7,), FREE)
    for depths in ([1] * 400, [7] * 400, [7, 1] * 200):
        assert count(Shares(7), alike, depths).pooled == pytest.approx(0.7, abs=0.03)


def test_other_text_is_followed_within_300_verifications():
    shares = count(Shares(7), Traffic(1, WELL, FREE), [7] * 500)
    count(shares, Traffic(1, (0.0,), FREE), [7] * 300)
    assert shares.shares[0] < 0.05


def test_while_nothing_drafts_the_last_shares_stand_and_a_few_drafts_outweigh_them():
    shares = count(Shares(7), Traffic(16, BADLY, FREE), [7] * 200)
    before = shares.shares[0]
    count(shares, Traffic(16, BADLY, FREE), [0] * 10_000)
    assert shares.shares[0] == pytest.approx(before)
    shares.count(1, [1])
    shares.count(1, [1])
    assert shares.shares[0] > 0.6
    assert MEMORY < 300 / 4, "else the 300 verifications in which a change is followed could not be"
