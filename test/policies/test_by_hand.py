"""Every paper's policy on batches small enough to work out by hand."""

import pytest

from policies.batches import BATCH, choose, logits_of
from selection.cases import indices, spell
from sglang_xshare import Batch, Router, build_plan

# Rows of one model for two requests, and two experts of rank 0 that are warm.
PAIR = logits_of([6, 1, 1, 2, 1, 1], [3, 6, 1, 1, 1, 2])
RANKED = logits_of([6, 1, 4, 5, 2, 3], [1, 6, 4, 5, 2, 3])
# Top-2 votes: expert 0 three times, 1 twice, 2, 3 and 4 once each. Expert 5 scores nothing. Row 3 votes for 3 and 4;
# between 2, 3 and 4 utility decides: 3, then 4, then 2.
VOTES = logits_of([6, 4, 1, 1, 2, 0], [6, 4, 1, 1, 2, 0], [6, 1, 4, 1, 2, 0], [1, 1, 1, 8, 2, 0])
# Sums of the scores: 9, 7, 6, 10, 5, 3 (of 40). Top-2: rows 0 and 1: 0, 1; row 2: 3, 2; row 3: 3, 4.
DRAFTS = logits_of([4, 3, 1, 1, 0.5, 0.5], [4, 3, 1, 1, 0.5, 0.5], [0.5, 0.5, 3, 4, 1, 1], [0.5, 0.5, 1, 4, 3, 1])
# Rankings: row 0: 0 1 2 3 4 5; row 1: 5 4 3 2 1 0; row 2: 2 0 1 3 4 5.
RANKINGS = logits_of([32, 16, 8, 4, 2, 2], [2, 2.5, 4, 8, 16, 32], [16, 8, 32, 4, 2, 1])
# Scores relative to the first: 1, 1/2, 1/4 and 1, 1/3, 2/9.
RATIOS = logits_of([8, 4, 2, 1, 1], [1, 3, 1, 9, 2])
ALL = "012345"

SELECTED = [  # logits, top-k, {policy: S}
    # The warm-up is every row's best.
    (BATCH, 2, {"xshare:k0=1,add=0": "013", "xshare:k0=2,add=0": "01234"}),
    # The rest by utility: expert 4 (0.5), then 2 (0.3); expert 5 is in nobody's top-2.
    (BATCH, 2, {"xshare:add=1": "0134", "xshare:add=2": "01234", "xshare:add=99": "01234"}),
    (BATCH, 2, {"xshare:add=99,utility=full": ALL}),
    # Without a warm-up utility alone decides: 0.6, 0.9, 0.3, 0.7, 0.5.
    (BATCH, 2, {"xshare:k0=0,add=1": "1", "xshare:k0=0,add=3": "013"}),
    # Squared shares: expert 3 has 0.49, expert 1 0.16 + 0.25, expert 0 0.36.
    (BATCH, 2, {"xshare:k0=0,add=1,utility=squared": "3", "xshare:k0=0,add=2,utility=squared": "13"}),
    # The warm-up {0, 1, 3} holds 2.2 of 3. Without a cap mass 1 adds experts 4 and 2.
    (BATCH, 2, {"xshare:mass=0.7": "013", "xshare:mass=0.8": "0134", "xshare:mass=0.7,max_add=1": "013"}),
    # Lynx keeps the most voted, or drops the least voted of those with a vote, but never below the top-k.
    (VOTES, 2, {"lynx-lat:retain=3": "013", "lynx-lat:retain=4": "0134", "lynx-lat:retain=5": "01234"}),
    (VOTES, 2, {"lynx-lat:drop=0": "01234", "lynx-lat:drop=1": "0134", "lynx-lat:drop=2": "013"}),
    # Only row 3 gives more than half of its 13 to one expert; with 6 of 14 the others are confident at 0.4.
    (VOTES, 2, {"lynx-acc:confidence=0.5": "03", "lynx-acc:confidence=0.5,min_votes=1": "34"}),
    (VOTES, 2, {"lynx-acc:confidence=0.4": "013", "lynx-acc:confidence=0.4,min_votes=1": "01234"}),
    # Two experts of a half each reach the threshold exactly.
    (logits_of([1, 1, 0, 0], [3, 1, 1, 0]), 2, {"lynx-acc:confidence=0.5,min_votes=1": "01"}),
    # The most confident row votes if none is sure.
    (VOTES, 2, {"lynx-acc:confidence=1.0,min_votes=1": "34"}),
]


@pytest.mark.parametrize(("logits", "top_k", "wanted"), SELECTED)
def test_selected(logits, top_k, wanted):
    for text, experts in wanted.items():
        assert indices(choose(logits, spell(text), Router(top_k)).selected) == set(map(int, experts)), text


def test_a_request_adds_outside_its_own_warm_up_and_has_a_budget_of_its_own():
    """Expert 0 is request 0's warm-up and request 1's best addition: request 1 adds it, not the next."""
    one, two = Batch(), Batch(tokens_per_request=2)
    order = build_plan("moe-spec", budget=2, ranking="static", order=[5, 4, 3, 2, 1, 0], scope="request")
    for logits, plan, router, batch, experts in (
        (PAIR, spell("xshare:add=0,add_per_request=1"), Router(3), one, "013"),
        (PAIR, spell("xshare:add=0,add_per_request=1"), Router(3), two, "013"),
        (PAIR, spell("xshare:add=0,add_per_request=2"), Router(3), two, "0135"),
        (DRAFTS, spell("moe-spec:budget=1,scope=request"), Router(2), two, "03"),
        (DRAFTS, spell("moe-spec:budget=2,scope=request"), Router(2), two, "0123"),
        (DRAFTS, spell("moe-spec:budget=2"), Router(2), two, "03"),
        (DRAFTS, order, Router(2), one, "45"),
    ):
        assert indices(choose(logits, plan, router, batch).selected) == set(map(int, experts)), plan


def test_ranks():
    """Algorithm 5: S starts with two experts of rank 0, and a round adds one expert on each rank; `fill` brings each
    rank to its target. OEA's base is {0, 2, 5}, two of rank 0: rank 1 adds 4, the second choice of row 1.
    """
    ranks = [0, 0, 0, 1, 1, 1]
    for target, literal, filled in ((1, "01", "013"), (2, "0123", "0135"), (3, ALL, ALL)):
        for balance, experts in (("literal", literal), ("fill", filled)):
            plan = spell(f"xshare:target_per_rank={target},balance={balance}")
            assert indices(choose(RANKED, plan, Router(6), None, ranks).selected) == set(map(int, experts))
    out = choose(RANKINGS, spell("oea:k0=1,target_per_rank=1"), Router(3), rank_of_expert=ranks)
    assert (indices(out.selected), out.topk_ids.tolist()) == ({0, 2, 4, 5}, [[0, 2, 4], [5, 4, 2], [2, 0, 4]])
    assert choose(RANKINGS, spell("oea:k0=1,target_per_rank=3"), Router(3), rank_of_expert=ranks).selected.all()


IDS = [  # logits, top-k, policy, ids
    (RATIOS, 3, "vanilla", [[0, 1, 2], [3, 1, 4]]),
    (RATIOS, 3, "pruned:k0=3,p=0.45", [[0, -1, -1], [3, -1, -1]]),
    (RATIOS, 3, "dynamic-skip:beta=0.4", [[0, 1, -1], [3, -1, -1]]),
    (BATCH, 2, "xshare:add=0", [[0, 1], [3, 0], [1, 0]]),
    # A row gets exactly top_k, as OEA's text says, not one more as in its break test.
    (RANKINGS, 3, "oea:k0=1", [[0, 2, 5], [5, 2, 0], [2, 0, 5]]),
    (RANKINGS, 3, "oea:k0=1,kmax=5", [[0, 2, 5, -1, -1], [5, 2, 0, -1, -1], [2, 0, 5, -1, -1]]),
    (RANKINGS, 3, "oea:k0=1,max_rank=3", [[0, 2, -1], [5, -1, -1], [2, 0, -1]]),
    (DRAFTS, 2, "moe-spec:budget=2", [[0, 3], [0, 3], [3, 0], [3, 0]]),
    (DRAFTS, 2, "moe-spec:budget=2,coverage=truncate", [[0, -1], [0, -1], [3, -1], [3, -1]]),
]


@pytest.mark.parametrize(("logits", "top_k", "text", "ids"), IDS)
def test_ids(logits, top_k, text, ids):
    assert choose(logits, spell(text), Router(top_k)).topk_ids.tolist() == ids
