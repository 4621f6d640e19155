"""Lynx on batches small enough to work out by hand."""

import torch

from policies.batches import logits_of
from sglang_xshare import Router, build_plan, select

# Top-2 votes: expert 0 three times, 1 twice, 2, 3 and 4 once each. Expert 5 scores nothing.
BATCH = logits_of([6, 4, 1, 1, 2, 0], [6, 4, 1, 1, 2, 0], [6, 1, 4, 1, 2, 0], [1, 1, 1, 8, 2, 0])


def selected(policy, logits=BATCH, top_k=2, **keys):
    return select(logits, build_plan(policy, **keys), Router(top_k)).selected.nonzero().flatten().tolist()


def test_lat_retains_the_most_voted():
    """Row 3 votes for 3 and 4: votes 3, 2, 1, 1, 1. Between 2, 3 and 4 utility decides: 3, then 4, then 2."""
    assert selected("lynx-lat", retain=3) == [0, 1, 3]
    assert selected("lynx-lat", retain=4) == [0, 1, 3, 4]
    assert selected("lynx-lat", retain=5) == [0, 1, 2, 3, 4]


def test_lat_drops_the_least_voted_of_those_with_a_vote():
    assert selected("lynx-lat", drop=0) == [0, 1, 2, 3, 4]
    assert selected("lynx-lat", drop=1) == [0, 1, 3, 4]
    assert selected("lynx-lat", drop=2) == [0, 1, 3]


def test_lat_never_keeps_fewer_than_the_top_k():
    assert selected("lynx-lat", retain=1) == [0, 1]
    assert selected("lynx-lat", drop=99) == [0, 1]


def test_lat_fills_a_large_budget_by_utility_but_not_with_what_scores_nothing():
    one_row = logits_of([6, 4, 1, 3, 2, 0])
    assert selected("lynx-lat", one_row, retain=3) == [0, 1, 3]
    assert selected("lynx-lat", one_row, retain=6) == [0, 1, 2, 3, 4]


def test_acc_listens_to_confident_rows():
    """Only row 3 gives more than half of its 13 to one expert; with 6 of 14 the others are confident at 0.4."""
    assert selected("lynx-acc", confidence=0.5, min_votes=2) == [0, 3]
    assert selected("lynx-acc", confidence=0.5, min_votes=1) == [3, 4]
    assert selected("lynx-acc", confidence=0.4, min_votes=2) == [0, 1, 3]
    assert selected("lynx-acc", confidence=0.4, min_votes=1) == [0, 1, 2, 3, 4]


def test_acc_hears_the_most_confident_row_where_none_is_sure():
    assert selected("lynx-acc", confidence=1.0, min_votes=1) == [3, 4]


def test_acc_hears_at_most_max_voters_the_lower_row_first():
    assert selected("lynx-acc", confidence=0.1, max_voters=1, min_votes=1) == [3, 4]
    assert selected("lynx-acc", confidence=0.1, max_voters=2, min_votes=1) == [0, 1, 3, 4]
    assert selected("lynx-acc", confidence=0.1, max_voters=3, min_votes=2) == [0, 1, 3]


def test_acc_reaches_a_threshold_exactly():
    """Two experts of a half each."""
    halves = logits_of([1, 1, 0, 0], [3, 1, 1, 0])
    assert selected("lynx-acc", halves, confidence=0.5, max_voters=8, min_votes=1) == [0, 1]
    halves_first = logits_of([3, 2, 1, 0], [0, 0, 1, 1])
    assert selected("lynx-acc", halves_first, confidence=0.5, min_votes=1) == [0, 1, 2, 3]


def test_acc_fills_up_to_the_top_k_by_utility():
    assert selected("lynx-acc", top_k=3, confidence=1.0, max_voters=1, min_votes=2) == [0, 1, 3]


def test_acc_ignores_rows_without_any_expert():
    dead = torch.full((2, 6), -torch.inf)
    assert selected("lynx-acc", torch.cat([dead, BATCH]), confidence=1.0, min_votes=1) == [3, 4]
    assert selected("lynx-acc", dead, confidence=1.0, min_votes=1) == []
