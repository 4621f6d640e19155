"""Every paper's policy on batches small enough to work out by hand."""

import pytest
import torch

from policies.batches import BATCH, choose, logits_of
from selection.cases import indices, spell
from sglang_xshare import Batch, Router, build_plan

# Rows of one model for two requests, and two experts of rank 0 that are warm.
PAIR = logits_of([6, 1, 1, 2, 1, 1], [3, 6, 1, 1, 1, 2])
RANKED = logits_of([6, 1, 4, 5, 2, 3], [1, 6, 4, 5, 2, 3])
# Top-2 votes: expert 0 three times, 1 twice, 2, 3 and 4 once each. Expert 5 scores nothing. Row 3 votes for 3 and 4;
# between 2, 3 and 4 utility decides: 3, then 4, then 2.
VOTES = logits_of([6, 4, 1, 1, 2, 0], [6, 4, 1, 1, 2, 0], [6, 1, 4, 1, 2, 0], [1, 1, 1, 8, 2, 0])
DEAD = torch.full((2, 6), -torch.inf)
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
    # Expert 1 has the most scores and shares, expert 3 the most squared ones.
    (BATCH, 2, {"moe-spec:budget=1,utility=full": "1", "moe-spec:budget=1,utility=topk": "1"}),
    (BATCH, 2, {"moe-spec:budget=1,utility=squared": "3"}),
    # Equal utilities go to the lower index.
    (torch.zeros(1, 8), 8, {"xshare:k0=0,add=3": "012"}),
    # The warm-up {0, 1, 3} holds 2.2 of 3. Without a cap mass 1 adds experts 4 and 2.
    (BATCH, 2, {"xshare:mass=0.7": "013", "xshare:mass=0.8": "0134", "xshare:mass=0.7,max_add=1": "013"}),
    (BATCH, 2, {"xshare:mass=1.0,max_add=1": "0134", "xshare:mass=1.0,max_add=2": "01234"}),
    (BATCH, 2, {"xshare:k0=0,add=1,mass=1.0,max_add=1": "13", "xshare:k0=0,add=1,mass=1.0,max_add=2": "013"}),
    # Lynx keeps the most voted, or drops the least voted of those with a vote, but never below the top-k.
    (VOTES, 2, {"lynx-lat:retain=3": "013", "lynx-lat:retain=4": "0134", "lynx-lat:retain=5": "01234"}),
    (VOTES, 2, {"lynx-lat:drop=0": "01234", "lynx-lat:drop=1": "0134", "lynx-lat:drop=2": "013"}),
    (VOTES, 2, {"lynx-lat:retain=1": "01", "lynx-lat:drop=99": "01"}),
    # It fills a large budget by utility, but not with what scores nothing.
    (logits_of([6, 4, 1, 3, 2, 0]), 2, {"lynx-lat:retain=3": "013", "lynx-lat:retain=6": "01234"}),
    # Only row 3 gives more than half of its 13 to one expert; with 6 of 14 the others are confident at 0.4.
    (VOTES, 2, {"lynx-acc:confidence=0.5": "03", "lynx-acc:confidence=0.5,min_votes=1": "34"}),
    (VOTES, 2, {"lynx-acc:confidence=0.4": "013", "lynx-acc:confidence=0.4,min_votes=1": "01234"}),
    # The most confident row votes if none is sure, and at most `max_voters`, the lower row first.
    (VOTES, 2, {"lynx-acc:confidence=1.0,min_votes=1": "34"}),
    (VOTES, 2, {"lynx-acc:confidence=0.1,max_voters=1,min_votes=1": "34"}),
    (VOTES, 2, {"lynx-acc:confidence=0.1,max_voters=2,min_votes=1": "0134"}),
    (VOTES, 2, {"lynx-acc:confidence=0.1,max_voters=3,min_votes=2": "013"}),
    (VOTES, 3, {"lynx-acc:confidence=1.0,max_voters=1,min_votes=2": "013"}),  # filled up to the top-k
    # Two experts of a half each reach the threshold exactly.
    (logits_of([1, 1, 0, 0], [3, 1, 1, 0]), 2, {"lynx-acc:confidence=0.5,min_votes=1": "01"}),
    (logits_of([3, 2, 1, 0], [0, 0, 1, 1]), 2, {"lynx-acc:confidence=0.5,min_votes=1": "0123"}),
    # Rows without any expert have no say.
    (torch.cat([DEAD, VOTES]), 2, {"lynx-acc:confidence=1.0,min_votes=1": "34"}),
    (DEAD, 2, {"lynx-acc:confidence=1.0,min_votes=1": ""}),
    # A budget is the size of S.
    (DRAFTS, 2, {"moe-spec:budget=1": "3", "moe-spec:budget=3": "013", "moe-spec:budget=6": ALL}),
    # `p` ends a warm-up with the expert that reaches it, of at most k0.
    (torch.zeros(1, 4), 4, {"oea:k0=3,p=0.25": "0", "oea:k0=3,p=0.2501": "01", "oea:k0=3,p=0.99": "012"}),
]


@pytest.mark.parametrize(("logits", "top_k", "wanted"), SELECTED)
def test_selected(logits, top_k, wanted):
    for text, experts in wanted.items():
        assert indices(choose(logits, spell(text), Router(top_k)).selected) == set(map(int, experts)), text


def test_p_is_a_share_of_all_experts_also_for_a_sigmoid():
    """Scores 0.5 each: one of eight experts is an eighth of the row, though its score is a half."""
    out = choose(torch.zeros(1, 8), spell("oea:k0=4,p=0.25"), Router(4, "sigmoid"))
    assert indices(out.selected) == {0, 1}


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
    assert indices(out.selected) == {0, 2, 4, 5}
    assert out.topk_ids.tolist() == [[0, 2, 4], [5, 4, 2], [2, 0, 4]]
    assert choose(RANKINGS, spell("oea:k0=1,target_per_rank=3"), Router(3), rank_of_expert=ranks).selected.all()


IDS = [  # logits, top-k, policy, ids
    (RATIOS, 3, "vanilla", [[0, 1, 2], [3, 1, 4]]),
    (RATIOS, 3, "pruned:k0=2", [[0, 1, -1], [3, 1, -1]]),
    (RATIOS, 3, "pruned:k0=3,p=0.45", [[0, -1, -1], [3, -1, -1]]),
    (RATIOS, 3, "dynamic-skip:beta=0.4", [[0, 1, -1], [3, -1, -1]]),
    (RATIOS, 3, "dynamic-skip:beta=0.2", [[0, 1, 2], [3, 1, 4]]),
    (RATIOS, 3, "dynamic-skip:beta=1", [[0, -1, -1], [3, -1, -1]]),
    (BATCH, 2, "xshare:add=0", [[0, 1], [3, 0], [1, 0]]),
    # A row gets exactly top_k, as OEA's text says, not one more as in its break test.
    (RANKINGS, 3, "oea:k0=1", [[0, 2, 5], [5, 2, 0], [2, 0, 5]]),
    (RANKINGS, 3, "oea:k0=1,kmax=2", [[0, 2], [5, 2], [2, 0]]),
    (RANKINGS, 3, "oea:k0=1,kmax=5", [[0, 2, 5, -1, -1], [5, 2, 0, -1, -1], [2, 0, 5, -1, -1]]),
    (RANKINGS, 3, "oea:k0=3,kmax=4", [[0, 1, 2, 3], [5, 4, 3, 2], [2, 0, 1, 3]]),
    (RANKINGS, 3, "oea:k0=1,max_rank=3", [[0, 2, -1], [5, -1, -1], [2, 0, -1]]),
    (RANKINGS, 3, "oea:k0=1,max_rank=1", [[0, -1, -1], [5, -1, -1], [2, -1, -1]]),
    (RANKINGS, 3, "oea:k0=2,max_rank=1", [[0, 1, -1], [5, 4, -1], [2, 0, -1]]),
    (DRAFTS, 2, "moe-spec:budget=2", [[0, 3], [0, 3], [3, 0], [3, 0]]),
    (DRAFTS, 2, "moe-spec:budget=2,coverage=truncate", [[0, -1], [0, -1], [3, -1], [3, -1]]),
]


@pytest.mark.parametrize(("logits", "top_k", "text", "ids"), IDS)
def test_ids(logits, top_k, text, ids):
    assert choose(logits, spell(text), Router(top_k)).topk_ids.tolist() == ids


def test_dynamic_skip_closes_the_gap_it_leaves():
    """With a bias the second choice can score less than the third."""
    logits = torch.tensor([[2.0, 0.0, 1.5, -9.0]])
    router = Router(3, "sigmoid", torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert choose(logits, spell("dynamic-skip:beta=0.7"), router).topk_ids.tolist() == [[0, 2, -1]]


WEIGHTS = [  # logits, top-k, policy, row, weights if the model renormalizes, times their sum, and kept mass
    (RATIOS, 3, "vanilla", 0, [8, 4, 2], 14, 1),
    (RATIOS, 3, "pruned:k0=2", 0, [8, 4, 0], 12, 12 / 14),
    (BATCH, 2, "xshare:add=0", 1, [7, 1], 8, 8 / 10),
    # The row has 7 + 1 of its own 7 + 3.
    (BATCH, 2, "xshare:add=0,own_share=0.5", 1, [7, 1], 80**0.5, 8 / 10),
    (BATCH, 2, "xshare:add=0,own_share=0.75", 1, [7, 1], 8**0.25 * 10**0.75, 8 / 10),
    (BATCH, 2, "xshare:add=0,own_share=1", 1, [7, 1], 10, 8 / 10),
    (BATCH, 2, "xshare:add=0,own_share=1", 0, [6, 4], 10, 1),
    (RANKINGS, 3, "oea:k0=1", 0, [32, 8, 2], 42, 42 / 56),
    (DRAFTS, 2, "moe-spec:budget=2", 2, [4, 0.5], 4.5, 4.5 / 7),
    (DRAFTS, 2, "moe-spec:budget=2,coverage=truncate", 2, [4, 0], 7, 4 / 7),  # by the sum of the full top-k
]


@pytest.mark.parametrize(("logits", "top_k", "text", "row", "shares", "total", "kept"), WEIGHTS)
def test_weights(logits, top_k, text, row, shares, total, kept):
    out = choose(logits, spell(text), Router(top_k))
    assert out.topk_weights[row].tolist() == pytest.approx([share / total for share in shares])
    assert float(out.kept_mass[row]) == pytest.approx(kept)
    if "own_share" not in text:
        plain = choose(logits, spell(text), Router(top_k, renormalize=False))
        total = float(logits[row].exp().sum())
        assert plain.topk_weights[row].tolist() == pytest.approx([share / total for share in shares])


def test_rescue_gives_lost_rows_their_first_choice_and_counts_them():
    """A rescued expert serves everyone who wants it: expert 1 is only row 0's first choice, and row 1 has it second."""
    for text, rescued, experts, ids in (
        ("moe-spec:budget=1,coverage=truncate", 2, {0, 3}, [[0, -1], [0, -1], [3, -1], [3, -1]]),
        ("moe-spec:budget=1,coverage=truncate,rescue=false", 0, {3}, [[-1, -1], [-1, -1], [3, -1], [3, -1]]),
    ):
        out = choose(DRAFTS, spell(text), Router(2))
        assert (int(out.rescued), indices(out.selected), out.topk_ids.tolist()) == (rescued, experts, ids)
    assert out.kept_mass.tolist() == pytest.approx([0, 0, 4 / 7, 4 / 7])
    logits = logits_of([1, 4, 3, 1], [3.5, 3, 1, 1], [4, 1, 1, 3], [4, 1, 1, 3])
    out = choose(logits, spell("moe-spec:budget=1,coverage=truncate"), Router(2))
    assert int(out.rescued) == 1
    assert out.topk_ids.tolist() == [[1, -1], [0, 1], [0, -1], [0, -1]]
