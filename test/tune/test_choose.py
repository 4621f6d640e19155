"""The choice of settings: losses that rise as experts fall, and the best sum that the tolerance allows."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_xshare.tune.choose import Option, choose, smooth

few = settings(max_examples=60, deadline=None)
losses = st.floats(-1, 10, allow_nan=False)
experts = st.integers(0, 64).map(float)
group = st.lists(st.builds(Option, st.just("x"), losses, experts), max_size=4).map(
    lambda options: [Option("vanilla", 0.0, 64.0), *options]
)


@few
@given(st.lists(st.builds(Option, st.text(), losses, experts), min_size=1, max_size=8))
def test_losses_rise_as_experts_fall(options):
    smoothed = smooth(options)
    assert [one.experts for one in smoothed] == sorted((one.experts for one in options), reverse=True)
    found = [one.loss for one in smoothed]
    assert found == sorted(found)
    assert min(found) >= 0


def test_losses_in_order_stay_as_they_are():
    options = [Option("a", 0.0, 8), Option("b", 1.0, 6), Option("c", 2.0, 3)]
    assert smooth(options[::-1]) == options


def test_those_the_wrong_way_round_share_their_mean():
    options = [Option("a", 0.0, 8), Option("b", 3.0, 6), Option("c", 1.0, 3)]
    assert [one.loss for one in smooth(options)] == [0, 2, 2]


@few
@given(st.dictionaries(st.sampled_from("abc"), group, min_size=1), st.floats(0.1, 20))
def test_no_choice_within_the_tolerance_wakes_fewer(groups, tolerance):
    chosen = choose(groups, tolerance)
    assert sum(max(one.loss, 0) for one in chosen.values()) <= tolerance * (1 + 1e-9)
    # The grid may lose what is within a thousandth of the tolerance a group.
    allowed = tolerance * (1 - len(groups) / 1000)
    best = min(
        sum(one.experts for one in options)
        for options in product(*groups.values())
        if sum(max(one.loss, 0) for one in options) <= allowed
    )
    assert sum(one.experts for one in chosen.values()) <= best


def test_nothing_tolerated_leaves_what_loses_nothing():
    groups = {"a": [Option("vanilla", 0, 8), Option("x", 0, 4), Option("y", 1e-9, 2)]}
    assert choose(groups, 0.0)["a"].name == "x"


@pytest.mark.parametrize(("tolerance", "names"), [(1, "ax"), (3, "xa"), (4, "xx")])
def test_the_layer_that_bears_it_gives_more(tolerance, names):
    groups = {
        "0": [Option("a", 0, 9), Option("x", 3, 1)],
        "1": [Option("a", 0, 9), Option("x", 1, 5)],
    }
    assert "".join(one.name for one in choose(groups, tolerance).values()) == names
