"""Rounds in which timers take turns, and a timer that counts processor time."""

import time

from benchmark.common.timing import SLICE_S, call_timer, time_alternating


def test_timers_take_turns_and_warm_ups_are_dropped():
    asked = []

    def timer(name):
        return lambda: asked.append(name) or float(len(asked))

    assert time_alternating([timer("a"), timer("b")], rounds=2, warm_ups=1) == [[3.0, 5.0], [4.0, 6.0]]
    assert asked == ["a", "b"] * 3


def test_a_call_is_repeated_and_sleep_does_not_count():
    calls = []
    timer = call_timer(lambda: calls.append(sum(range(1000))))
    warmed = len(calls)
    assert 0 < timer() < SLICE_S
    assert len(calls) > warmed + 10
    assert call_timer(lambda: time.sleep(0.001))() < 0.001
