"""XShare on batches small enough to work out by hand."""

import pytest
import torch

from policies.batches import BATCH, logits_of
from sglang_xshare import Batch, Router, build_plan, select
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.policies.spelling import parse_policy


def selected(logits, batch=None, rank_of_expert=None, top_k=2, **keys):
    out = select(logits, build_plan("xshare", **keys), Router(top_k), batch, rank_of_expert)
    return out.selected.nonzero().flatten().tolist()


def test_warm_up_is_every_rows_best():
    assert selected(BATCH, k0=1, add=0) == [0, 1, 3]
    assert selected(BATCH, k0=2, add=0) == [0, 1, 2, 3, 4]


def test_add_counts_experts_beyond_the_warm_up():
    """The rest by utility: expert 4 (0.5), then 2 (0.3); expert 5 is in nobody's top-2."""
    assert selected(BATCH, k0=1, add=1) == [0, 1, 3, 4]
    assert selected(BATCH, k0=1, add=2) == [0, 1, 2, 3, 4]
    assert selected(BATCH, k0=1, add=99) == [0, 1, 2, 3, 4]
    assert selected(BATCH, k0=1, add=99, utility="full") == [0, 1, 2, 3, 4, 5]


def test_without_warm_up_utility_alone_decides():
    """Utilities 0.6, 0.9, 0.3, 0.7, 0.5."""
    assert selected(BATCH, k0=0, add=1) == [1]
    assert selected(BATCH, k0=0, add=3) == [0, 1, 3]


def test_squares_prefer_an_expert_that_one_row_needs_to_one_that_two_want():
    """Squared shares: expert 3 has 0.49, expert 1 0.16 + 0.25, expert 0 0.36."""
    assert selected(BATCH, k0=0, add=1, utility="squared") == [3]
    assert selected(BATCH, k0=0, add=2, utility="squared") == [1, 3]


def test_equal_utilities_go_to_the_lower_index():
    assert selected(torch.zeros(1, 8), top_k=8, k0=0, add=3) == [0, 1, 2]


@pytest.mark.parametrize(("mass", "experts"), [(0.5, 2), (0.50001, 3), (0.25, 1), (0.26, 2), (1.0, 4)])
def test_mass_stops_with_the_expert_that_reaches_it(mass, experts):
    """Four experts of a quarter each: two are exactly half."""
    assert selected(torch.zeros(3, 8), top_k=4, k0=0, mass=mass) == list(range(experts))


def test_mass_counts_the_warm_up():
    """The warm-up {0, 1, 3} holds 2.2 of 3."""
    assert selected(BATCH, k0=1, mass=0.7) == [0, 1, 3]
    assert selected(BATCH, k0=1, mass=0.8) == [0, 1, 3, 4]


@pytest.mark.parametrize(("max_add", "experts"), [(1, [0, 1, 3, 4]), (2, [0, 1, 2, 3, 4]), (99, [0, 1, 2, 3, 4])])
def test_max_add_caps_what_mass_adds_beyond_the_warm_up(max_add, experts):
    """Without a cap mass 1 adds experts 4 and 2; expert 5 has no utility."""
    assert selected(BATCH, k0=1, mass=1.0, max_add=max_add) == experts
    assert selected(BATCH, k0=1, mass=0.7, max_add=max_add) == [0, 1, 3]


def test_max_add_counts_beyond_add():
    assert selected(BATCH, k0=0, add=1, mass=1.0, max_add=1) == [1, 3]
    assert selected(BATCH, k0=0, add=1, mass=1.0, max_add=2) == [0, 1, 3]


def test_every_request_adds_outside_its_own_warm_up():
    """Expert 0 is request 0's warm-up and request 1's best addition: request 1 adds it, not the next."""
    logits = logits_of([6, 1, 1, 2, 1, 1], [3, 6, 1, 1, 1, 2])
    assert selected(logits, k0=1, add=0, add_per_request=1, top_k=3) == [0, 1, 3]
    together = Batch(tokens_per_request=2)
    assert selected(logits, together, k0=1, add=0, add_per_request=1, top_k=3) == [0, 1, 3]
    assert selected(logits, together, k0=1, add=0, add_per_request=2, top_k=3) == [0, 1, 3, 5]


def test_a_round_of_ranks_always_completes():
    """Algorithm 5: S starts with two experts of rank 0; at a total of 4 one round adds one expert on each rank."""
    ranks = [0, 0, 0, 1, 1, 1]
    logits = logits_of([6, 1, 4, 5, 2, 3], [1, 6, 4, 5, 2, 3])
    assert selected(logits, None, ranks, top_k=6, k0=1, target_per_rank=1) == [0, 1]
    assert selected(logits, None, ranks, top_k=6, k0=1, target_per_rank=2) == [0, 1, 2, 3]
    assert selected(logits, None, ranks, top_k=6, k0=1, target_per_rank=3) == [0, 1, 2, 3, 4, 5]


def test_fill_brings_each_rank_to_its_target():
    ranks = [0, 0, 0, 1, 1, 1]
    logits = logits_of([6, 1, 4, 5, 2, 3], [1, 6, 4, 5, 2, 3])
    assert selected(logits, None, ranks, top_k=6, k0=1, target_per_rank=1, balance="fill") == [0, 1, 3]
    assert selected(logits, None, ranks, top_k=6, k0=1, target_per_rank=2, balance="fill") == [0, 1, 3, 5]


def test_rows_route_within_the_selection_by_their_own_scores():
    out = select(BATCH, build_plan("xshare", k0=1, add=0), Router(2))
    assert out.topk_ids.tolist() == [[0, 1], [3, 0], [1, 0]]
    assert out.topk_weights[1].tolist() == pytest.approx([7 / 8, 1 / 8])
    assert out.kept_mass.tolist() == pytest.approx([1, 8 / 10, 6 / 10])


@pytest.mark.parametrize(("own_share", "divisor"), [(0, 8), (0.5, 80**0.5), (0.75, 8**0.25 * 10**0.75), (1, 10)])
def test_own_share_divides_by_what_the_row_would_have_had(own_share, divisor):
    """Row 1 has 7 + 1 of its own 7 + 3; row 0 keeps its own experts and their weights."""
    out = select(BATCH, build_plan("xshare", k0=1, add=0, own_share=own_share), Router(2))
    assert out.topk_weights[1].tolist() == pytest.approx([7 / divisor, 1 / divisor])
    assert out.topk_weights[0].tolist() == pytest.approx([0.6, 0.4])


@pytest.mark.parametrize("other", [{"add": 0}, {"add": 3}, {"add_per_request": 4}, {"target_per_rank": 5}])
def test_a_share_of_the_utility_is_kept_where_no_other_budget_is_given(other):
    """A plan alone, which has no rows, keeps what one of 8 rows does."""
    assert build_plan("xshare") == build_plan("xshare", k0=1, add=0, mass=0.9)
    assert build_plan("xshare", max_add=5) == build_plan("xshare", k0=1, add=0, mass=0.9, max_add=5)
    assert build_plan("xshare", **other).mass is None
    assert build_plan("xshare", mass=0.5, **other).mass == 0.5


SIZES = (1, 7, 8, 15, 16, 2000)


@pytest.mark.parametrize(
    ("policy", "masses"),
    [
        ("xshare", (0.85, 0.85, 0.9, 0.9, 0.93, 0.93)),
        ("xshare:careful", (0.93, 0.93, 0.95, 0.95, 0.97, 0.97)),
        ("xshare:fast", (0.8, 0.8, 0.85, 0.85, 0.9, 0.9)),
        ("xshare:mass=0.9", (0.9,) * 6),
        ("xshare:careful,mass=0.9", (0.9,) * 6),
        ("xshare:k0=1,add=24", (None,) * 6),
        ("xshare:careful,add=24", (None,) * 6),
    ],
)
@pytest.mark.parametrize("speculative", [False, True])
def test_the_share_follows_the_steps_rows_unless_it_is_given(policy, masses, speculative):
    name, keys = parse_policy(policy)
    schedule = build_schedule(name, {**keys, "min_rows": 1}, speculative)
    assert tuple(schedule.plan(3, rows).mass for rows in SIZES) == masses
    assert {plan.mass for plan in schedule.plans()} == set(masses)
    assert {plan.mass for plan in schedule.plans(range(4))} == set(masses)


def test_only_sizes_that_select_have_plans():
    """So that a switch or a check looks at no plan that no step gets."""
    assert {plan.mass for plan in build_schedule("xshare", {"min_rows": 9}, False).plans()} == {0.9, 0.93}
    assert {plan.mass for plan in build_schedule("xshare", {"max_rows": 15}, False).plans()} == {0.85, 0.9}
