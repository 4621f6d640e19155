"""The decision on a depth, step by step; `test_traffic.py` has it meet traffic."""

import time
import timeit
from itertools import groupby

import pytest

from depth.simulation import CANDIDATES
from sglang_xshare.depth.decision import BLOCK, HISTORY, PERIOD, RETRIAL, SOON, TRIAL, Depths, SizeState, choose

TOKENS = [1.0, 1.8, 2.4, 2.9]
LEVEL = dict.fromkeys(CANDIDATES, 1.0)


@pytest.mark.parametrize(
    ("seconds", "depth", "chosen"),
    [
        ({0: 1.0, 1: 1.5, 2: 2.0, 3: 4.0}, 0, 1),  # 1.0, 1.2, 1.2, 0.725 tokens per second: of equals the shallower
        ({0: 1.0, 1: 1.5, 2: 2.0, 3: 4.0}, 2, 2),  # none is better than the depth in use
        ({0: 1.0, 1: 1.8 / 1.02}, 0, 0),  # 2 % better is not enough
        ({0: 1.0, 1: 1.8 / 1.03}, 0, 1),
        ({0: 1.0, 1: 1.8}, 1, 1),
        ({0: 1.0, 1: 1.9, 3: 3.0}, 3, 0),  # no drafts at all: 1.0 before 0.95 and 0.97
        ({1: 1.5}, 3, 3),  # the depth in use has no time, so none is known to be better
        ({}, 3, 3),
    ],
)
def test_the_depth_with_most_tokens_per_second_wins_by_more_than_2_percent(seconds, depth, chosen):
    assert choose(TOKENS, seconds, depth) == chosen


def run(
    state: SizeState, steps: int, tokens: list[float] | None = None, times: dict[int, float] | None = None
) -> list[int]:
    """The depths of so many steps, each of which completes with its time before the next."""
    used = []
    for _ in range(steps):
        used.append(state.current)
        if times is not None:
            state.update_times(state.current, [times[state.current]])
        if state.count(state.current):
            state.decide(tokens or [1.0] * 8)
    return used


def make(depth: int = 3) -> SizeState:
    state = SizeState(CANDIDATES, depth)
    state.decide([1.0] * 8)
    return state


EXPLORED = BLOCK + (len(CANDIDATES) - 1) * (TRIAL + BLOCK)
"""Verifications until each candidate has a time."""


def count_blocks(used: list[int]) -> list[tuple[int, int]]:
    """The depths in their order, each with its verifications in a row."""
    return [(depth, len(list(block))) for depth, block in groupby(used)]


def test_every_candidate_without_a_time_has_8_verifications_neighbours_first_between_blocks_of_the_depth_in_use():
    blocks = count_blocks(run(make(), EXPLORED, times=LEVEL))
    assert blocks[1::2] == [(depth, TRIAL) for depth in (1, 5, 0, 7)]
    assert blocks[::2] == [(3, BLOCK)] * len(CANDIDATES)


def test_neighbours_of_the_depth_in_use_have_4_verifications_in_every_256():
    state = make()
    run(state, EXPLORED + 4 * PERIOD, times=LEVEL)
    used = run(state, 4 * PERIOD, times=LEVEL)
    assert {depth: used.count(depth) for depth in set(used)} == {
        1: pytest.approx(4 * RETRIAL, abs=RETRIAL),
        5: pytest.approx(4 * RETRIAL, abs=RETRIAL),
        3: pytest.approx(4 * (PERIOD - 2 * RETRIAL), abs=4 * RETRIAL),
    }


def test_a_new_depth_is_compared_with_its_neighbours_sooner():
    """A choice by few steps may be wrong, and a change of the text is followed from neighbour to neighbour."""
    state = make(depth=0)
    run(state, EXPLORED + 8 * PERIOD, times=LEVEL)
    assert state.depth == 0
    one_pays = [1.0, 1.4, *[1.0] * 6]
    while state.depth == 0:
        run(state, 1, one_pays, LEVEL)
    blocks = count_blocks(run(state, 2 * PERIOD, one_pays, LEVEL))
    assert blocks[:2] == [(1, BLOCK), (3, RETRIAL)], "not used for long"
    last: dict[int, int] = {}
    waits, clock = [], 0
    for depth, steps in blocks:
        if depth == 3 and depth in last:
            waits.append(clock - last[depth])
        clock += steps
        last[depth] = clock
    assert SOON <= waits[0] <= 3 * SOON
    assert waits == sorted(waits)
    assert waits[-1] > waits[0]


def test_a_trial_without_a_time_is_not_repeated_before_a_period_has_passed():
    """Prefills between the steps of a trial: it is not timed, and the server must not try for ever."""
    state = make()
    state.update_times(3, [1.0])
    blocks = count_blocks(run(state, EXPLORED))
    assert blocks[1::2] == [(depth, TRIAL) for depth in (1, 5, 0, 7)]
    assert set(run(state, PERIOD - EXPLORED)) == {3}
    assert set(run(state, PERIOD)) == {*CANDIDATES}


def test_without_a_time_of_the_depth_in_use_there_is_nothing_to_try():
    assert set(run(make(), 2 * PERIOD)) == {3}


def serve(depths: Depths, size: int, steps: int, times: dict[int, float]) -> list[int]:
    """The depths of so many steps of a batch size, each of which completes with its time before the next."""
    used, state = [], depths.find(size)
    for _ in range(steps):
        used.append(state.current)
        state.update_times(state.current, [times[state.current]])
        if depths.count(size, state.current, [state.current]):
            depths.decide(size)
    return used


def test_a_batch_size_borrows_the_times_of_the_nearest_one_of_at_most_twice_as_many_requests():
    """It tries only the neighbours of its depth, and those only `SOON` steps later."""
    depths = Depths(lambda size: CANDIDATES, 7, start=3)
    alike = {depth: 10.0 * (1 + depth) for depth in CANDIDATES}  # all drafts are accepted, so all depths are as fast
    # Of 16 requests depths have another ratio, so a time that was borrowed there would show.
    for size, taken in ((4, alike), (16, {depth: 99.0 * (1 + depth) ** 1.01 for depth in CANDIDATES})):
        assert set(serve(depths, size, EXPLORED, taken)) == {*CANDIDATES}
        depths.states[size].depth = 3
    slower = {depth: 1.5 * seconds for depth, seconds in alike.items()}
    assert set(serve(depths, 8, SOON, slower)) == {3}
    assert depths._borrow(8) == pytest.approx({depth: slower[depth] for depth in (0, 1, 5, 7)}), "4 is nearer than 16"
    assert set(serve(depths, 8, 3 * SOON, slower)) == {1, 3, 5}
    assert depths._borrow(8).keys() == {0, 7}, "1 and 5 are measured"
    assert set(serve(depths, 33, EXPLORED, alike)) == {*CANDIDATES}, "16 is too far"


TIMES: dict[str, tuple[list[list[float]], float]] = {  # times of steps, update by update, and the smoothed time
    "the median, so that a step that waited counts no more than another": ([[1.0, 1.1, 0.9, 50.0, 1.0]], 1.0),
    "a retrial counts as its part of the latest 8 steps": ([[1.0] * 4, [1.44] * 4], 1.2),
    "of equal parts the geometric mean": ([[1.0] * 4, [1.44] * 4, [1.2 * 1.21**2] * 4], 1.2 * 1.21),
    # Two of three steps may have waited, for example for a kernel that is compiled at a new width.
    "it doubles at most at once": ([[1.0] * HISTORY, [50.0] * HISTORY], 2.0),
    "it halves at most at once": ([[2.0] * HISTORY, [0.1] * HISTORY], 1.0),
    "more steps than a smoothed time covers are all of it": ([[1.0] * HISTORY, [1.5] * 2 * HISTORY], 1.5),
}


@pytest.mark.parametrize("case", TIMES)
def test_a_time_is_smoothed(case):
    state, (updates, smoothed) = make(), TIMES[case]
    for seconds in updates:
        state.update_times(3, seconds)
    assert state.seconds == {3: pytest.approx(smoothed)}


def test_the_depth_in_use_shows_how_much_slower_all_steps_are_than_before():
    state = make()
    for depth, seconds in ((3, 1.0), (5, 2.0)):
        state.update_times(depth, [seconds] * HISTORY)
    state.decide([1.0] * 5 + [3.0] * 3)
    assert state.depth == 5
    state.update_times(5, [2.2] * HISTORY)
    assert state.seconds == {3: 1.0, 5: pytest.approx(2.2)}, "the first block of a depth corrects that depth alone"
    state.decide([1.0] * 5 + [3.0] * 3)
    state.update_times(5, [3.3] * HISTORY)
    assert state.seconds == {3: pytest.approx(1.5), 5: pytest.approx(3.3)}
    state.update_times(3, [1.2] * HISTORY)
    assert state.seconds == {3: pytest.approx(1.2), 5: pytest.approx(3.3)}, "a trial is of its depth alone"


def test_steps_launched_before_the_last_decision_end_no_block():
    state = make()
    assert not any(state.count(1) for _ in range(BLOCK))
    assert state.left == BLOCK
    assert [state.count(3) for _ in range(BLOCK)] == [False] * (BLOCK - 1) + [True]


def test_a_new_batch_size_begins_with_the_depth_of_the_nearest():
    depths = Depths(lambda size: (0, 1) if size >= 32 else CANDIDATES, 7, start=3)
    assert depths.find(8).depth == 3
    depths.states[8].depth = 5
    assert depths.find(6).depth == 5
    assert depths.find(64).depth == 1, "the candidate that is nearest"


def test_a_new_batch_size_prefers_the_nearest_that_has_times():
    """As requests end one by one, each size is new and has no time: the depth of the largest must not pass down."""
    depths = Depths(lambda size: CANDIDATES, deepest=3, start=1)
    depths.find(4).depth, depths.find(16).depth = 3, 0
    for size in (4, 16):
        depths.states[size].seconds[0] = 1.0
    assert [depths.find(size).depth for size in range(15, 4, -1)] == [0] * 5 + [3] * 6


def test_forgotten_times_leave_depths_and_shares_and_are_measured_again_at_once():
    depths = Depths(lambda size: CANDIDATES, 7, start=3)
    alike = {depth: 1.0 + depth for depth in CANDIDATES}  # all drafts are accepted, so all depths are as fast
    serve(depths, 2, EXPLORED, alike)
    depths.count(2, 3, [2, 3])
    state, shares = depths.states[2], depths.shares.shares
    state.depth = 5
    assert state.period > SOON
    depths.forget_times()
    assert (depths.shares.shares, state.depth, state.seconds) == (shares, 5, {})
    assert (state.current, state.left) == (5, BLOCK), "the depth in use first"
    assert (state.period, state._steps) == (SOON, {})
    assert set(serve(depths, 2, EXPLORED, alike)) == {*CANDIDATES}


def test_one_candidate_is_never_left():
    state = SizeState((0,), 0)
    state.decide([1.0])
    assert set(run(state, 600, [1.0], {0: 1.0})) == {0}


def test_deciding_takes_at_most_20_us_a_step():
    """The mean processor time of a step, with 16 requests and 5 candidates that have all their times."""
    depths = Depths(lambda size: CANDIDATES, 7, start=7)
    state = depths.find(16)
    for depth in CANDIDATES:
        state.update_times(depth, [0.01] * BLOCK)

    def step() -> None:
        if depths.count(16, 7, [3] * 16):
            state.update_times(7, [0.01] * BLOCK)
            depths.decide(16)

    taken = min(timeit.repeat(step, number=1000, repeat=5, timer=time.process_time)) / 1000
    assert taken < 20e-6
