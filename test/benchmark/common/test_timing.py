"""Rounds in which timers take turns, and a timer that counts processor time."""

from benchmark.cost.routers import time_alternating


def test_timers_take_turns_and_warm_ups_are_dropped():
    asked = []

    def timer(name):
        return lambda: asked.append(name) or float(len(asked))

    assert time_alternating([timer("a"), timer("b")], rounds=2, warm_ups=1) == [[3.0, 5.0], [4.0, 6.0]]
    assert asked == ["a", "b"] * 3
