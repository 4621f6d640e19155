"""The search for a budget: within its bounds, over in so many moves, and still while the traffic is."""

import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_xshare.policies.description import describe
from sglang_xshare.policies.governor import Governor, Search, begin, decide, most_moves
from sglang_xshare.policies.schedule import build_schedule

GOVERNORS = st.builds(
    lambda floor, low, width: Governor(floor, "add", low, low + width),
    st.floats(0.5, 0.995),
    st.integers(1, 8),
    st.integers(1, 120),
)
SHARES = st.floats(0, 1)


def kept(governor: Governor, scale: float, budget: int) -> float:
    """A kept mass that grows with the budget, ever slower, as measured ones do."""
    return 1 - (1 - governor.kept_mass) * scale * (governor.high / budget - 1 + 1e-3)


def search_on(governor: Governor, search: Search, masses: Any) -> list[Search]:
    """Every state, from the first on."""
    states = [search]
    for mass in masses:
        states.append(decide(governor, states[-1], mass(states[-1].budget)))
        assert governor.low <= states[-1].budget <= governor.high
        assert governor.low - 1 <= states[-1].below < states[-1].above <= governor.high
    return states


def count_moves(states: list[Search]) -> int:
    return sum(one.budget != other.budget for one, other in pairwise(states))


@given(GOVERNORS, SHARES, st.lists(SHARES, min_size=1, max_size=200))
def test_whatever_is_measured_the_bounds_hold_and_a_search_ends(governor, start, masses):
    budget = governor.low + round(start * (governor.high - governor.low))
    states = search_on(governor, begin(governor, budget), [lambda budget, mass=mass: mass for mass in masses])
    moves = 0
    for former, now in pairwise(states):
        moves = 0 if former.settled else moves + (now.budget != former.budget)
        assert moves <= most_moves(governor)


@given(GOVERNORS, SHARES, st.floats(0, 4), st.data())
def test_a_stationary_batch_ends_one_search_and_is_then_left_alone(governor, start, scale, data):
    """Noise within half a slack: on from any budget it settles, on one that holds the floor within the slack."""
    noise = st.floats(-governor.slack / 2, governor.slack / 2)

    def measure(budget: int) -> float:
        return kept(governor, scale, budget) + data.draw(noise)

    budget = governor.low + round(start * (governor.high - governor.low))
    states = search_on(governor, begin(governor, budget), [measure] * (most_moves(governor) + 2))
    assert states[-1].settled
    assert count_moves(states) <= most_moves(governor)
    still = search_on(governor, states[-1], [measure] * 50)
    assert count_moves(still) == 0
    found = still[-1].budget
    assert found == governor.high or kept(governor, scale, found) >= governor.kept_mass - governor.slack / 2
    if found > governor.low:
        assert kept(governor, scale, found - 1) < governor.kept_mass + governor.slack / 2


@given(GOVERNORS, st.floats(0, 4), st.floats(0, 4))
def test_it_follows_the_traffic_both_ways(governor, scale, other):
    """Without noise it finds the least budget that holds, whatever the traffic was before, or keeps what is no further
    than a slack from it.
    """
    states = [begin(governor, governor.high)]
    for now in (scale, other, scale):
        length = 2 * most_moves(governor)
        states = search_on(governor, states[-1], [lambda budget, now=now: kept(governor, now, budget)] * length)
        assert states[-1].settled
        found = states[-1].budget
        assert found == governor.high or kept(governor, now, found) >= governor.kept_mass - governor.slack
        reference = states[-1].reference
        assert reference is not None
        assert (
            found == governor.low or kept(governor, now, found) <= max(reference, governor.kept_mass) + governor.slack
        )
        smallest = (b for b in range(governor.low, governor.high) if kept(governor, now, b) >= governor.kept_mass)
        if count_moves(states):
            assert found == next(smallest, governor.high)


def test_a_search_by_hand():
    """Holds from 13 up: halves, then still; from 15 up: doubles, then halves."""
    governor = Governor(0.9, "add", 4, 40)
    states = search_on(governor, begin(governor, 40), [lambda budget: 0.8 + budget / 130] * 8)
    assert [one.budget for one in states] == [40, 21, 12, 16, 14, 13, 13, 13, 13]
    worse = search_on(governor, states[-1], [lambda budget: 0.76 + budget / 130] * 8)
    assert [one.budget for one in worse] == [13, 14, 16, 20, 18, 19, 19, 19, 19]


GOVERNED = {"kept_mass": 0.95, "add": [4, 40]}
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("xshare", {"governor": 3}, "governor = 3: allowed is an object such as"),
    ("xshare", {"governor": {"kept_mass": 0.9}}, "governor: no budget: allowed of xshare is one of k0, add,"),
    ("xshare", {"governor": {**GOVERNED, "k0": [1, 2]}}, "governor: 'add', 'k0': allowed"),
    ("xshare", {"governor": {"kept_mass": 0.9, "mass": [1, 2]}}, "governor: 'mass': allowed of xshare is one of"),
    ("xshare", {"governor": {"add": [4, 40]}}, "governor: kept_mass = None: allowed is a number in (0, 1)"),
    ("xshare", {"governor": {**GOVERNED, "kept_mass": 97}}, "governor: kept_mass = 97: allowed is a number in (0, 1)"),
    ("xshare", {"governor": {**GOVERNED, "every": 0}}, "governor: every = 0: allowed is an integer of at least 1"),
    ("xshare", {"governor": {**GOVERNED, "add": [0, 40]}}, "governor: add = [0, 40]: allowed are two integers from 1"),
    ("xshare", {"governor": {**GOVERNED, "add": [8, 8]}}, "governor: add = [8, 8]: allowed are two integers"),
    ("xshare", {"governor": {**GOVERNED, "add": 8}}, "governor: add = 8: allowed are two integers"),
    ("xshare", {"add": 2, "governor": GOVERNED}, "add = 2: its governor allows an integer from 4 to 40"),
    ("lynx-acc", {"confidence": 0.5, "governor": GOVERNED}, "lynx-acc has no budget to move"),
    ("oea", {"kmax": 4, "governor": {"kept_mass": 0.9, "k0": [1, 6]}}, "kmax = 4: allowed only from k0 = 6 up"),
    ("xshare", {"layers": {"0": {"governor": GOVERNED}}}, "layers '0' = {'governor'"),
]


@pytest.mark.parametrize(("policy", "keys", "line"), BAD, ids=[line for *_, line in BAD])
def test_bad_input_gets_one_line(policy, keys, line):
    with pytest.raises(ValueError, match=re.escape(line)) as error:
        build_schedule(policy, keys, speculative=False)
    assert "\n" not in str(error.value)


def test_a_governed_schedule_plans_for_both_bounds():
    schedule = build_schedule("xshare", {"k0": 1, "governor": GOVERNED, "layers": {"1": {"add": 2}}}, False)
    assert schedule is not None
    assert schedule.governor == Governor(0.95, "add", 4, 40, 8)
    assert schedule.keys == {"k0": 1, "add": 40}
    assert sorted(plan.add for plan in schedule.plans(range(3))) == [2, 4, 40]
    assert describe(schedule)["governor"] == GOVERNED
    now = schedule.at(9)
    assert [now.plan(layer, 16).add for layer in range(2)] == [9, 2]
    assert now.given == {"policy": "xshare", "k0": 1, "governor": GOVERNED, "layers": {"1": {"add": 2}}, "add": 9}


def test_it_starts_from_the_policys_own_key_where_that_is_given():
    for policy, keys, start in (
        ("xshare", {"add": 6, "governor": GOVERNED}, 6),
        ("xshare", {"governor": GOVERNED}, 40),
        ("moe-spec", {"phases": ["decode"], "governor": {"kept_mass": 0.9, "budget": [8, 32]}}, 32),
        ("lynx-lat", {"governor": {"kept_mass": 0.9, "retain": [8, 32]}}, 32),
    ):
        schedule = build_schedule(policy, keys, speculative=False)
        assert schedule is not None
        assert schedule.governor is not None
        assert schedule.keys[schedule.governor.key] == start
