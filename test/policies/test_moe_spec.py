"""MoE-Spec, Algorithm 1, on batches small enough to work out by hand."""

import pytest

from policies.batches import BATCH as SHARES
from policies.batches import logits_of
from sglang_xshare import Batch, Router, build_plan, select

# Sums of the scores: 9, 7, 6, 10, 5, 3 (of 40). Top-2: rows 0 and 1: 0, 1; row 2: 3, 2; row 3: 3, 4.
BATCH = logits_of([4, 3, 1, 1, 0.5, 0.5], [4, 3, 1, 1, 0.5, 0.5], [0.5, 0.5, 3, 4, 1, 1], [0.5, 0.5, 1, 4, 3, 1])


def run(batch=None, router=None, **keys):
    out = select(BATCH, build_plan("moe-spec", **keys), router or Router(2), batch)
    return out, out.selected.nonzero().flatten().tolist()


def test_the_budget_is_the_size_of_the_shortlist():
    assert run(budget=1)[1] == [3]
    assert run(budget=3)[1] == [0, 1, 3]
    assert run(budget=6)[1] == [0, 1, 2, 3, 4, 5]


def test_another_utility_ranks_otherwise():
    """Of XShare's batch expert 1 has the most scores and shares, expert 3 the most squared ones: 0.49 over 0.41."""
    for utility, best in (("full", 1), ("topk", 1), ("squared", 3)):
        out = select(SHARES, build_plan("moe-spec", budget=1, utility=utility), Router(2))
        assert out.selected.nonzero().flatten().tolist() == [best], utility


def test_missing_experts_are_substituted():
    out, _ = run(budget=2)
    assert out.topk_ids.tolist() == [[0, 3], [0, 3], [3, 0], [3, 0]]
    assert out.topk_weights[2].tolist() == pytest.approx([4 / 4.5, 0.5 / 4.5])


def test_truncated_rows_keep_the_weights_of_the_full_top_k():
    out, _ = run(budget=2, coverage="truncate")
    assert out.topk_ids.tolist() == [[0, -1], [0, -1], [3, -1], [3, -1]]
    assert out.topk_weights[2].tolist() == pytest.approx([4 / 7, 0])
    plain, _ = run(router=Router(2, renormalize=False), budget=2, coverage="truncate")
    assert plain.topk_weights[2].tolist() == pytest.approx([4 / 10, 0])


def test_rescue_gives_lost_rows_their_first_choice_and_counts_them():
    out, experts = run(budget=1, coverage="truncate")
    assert int(out.rescued) == 2
    assert experts == [0, 3]
    assert out.topk_ids.tolist() == [[0, -1], [0, -1], [3, -1], [3, -1]]
    out, experts = run(budget=1, coverage="truncate", rescue=False)
    assert int(out.rescued) == 0
    assert experts == [3]
    assert out.topk_ids.tolist() == [[-1, -1], [-1, -1], [3, -1], [3, -1]]
    assert out.kept_mass.tolist() == pytest.approx([0, 0, 4 / 7, 4 / 7])


def test_a_rescued_expert_serves_everyone_who_wants_it():
    """Expert 1 is nobody's first choice but row 0's; row 1 has it second."""
    logits = logits_of([1, 4, 3, 1], [3.5, 3, 1, 1], [4, 1, 1, 3], [4, 1, 1, 3])
    out = select(logits, build_plan("moe-spec", budget=1, coverage="truncate"), Router(2))
    assert int(out.rescued) == 1
    assert out.topk_ids.tolist() == [[1, -1], [0, 1], [0, -1], [0, -1]]


def test_static_follows_the_order_whatever_the_scores():
    order = [5, 4, 3, 2, 1, 0]
    assert run(budget=2, ranking="static", order=order)[1] == [4, 5]
    assert run(budget=2, ranking="static", order=order, scope="request")[1] == [4, 5]


def test_each_request_has_a_budget_of_its_own():
    pairs = Batch(tokens_per_request=2)
    assert run(pairs, budget=1, scope="request")[1] == [0, 3]
    assert run(pairs, budget=2, scope="request")[1] == [0, 1, 2, 3]
    assert run(pairs, budget=2)[1] == [0, 3]
