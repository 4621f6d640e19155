"""Medians, quartiles, ratios and fits, on figures that can be checked by hand."""

import pytest

from benchmark.common.comparison import Spread, fit_line, spread, summarize
from benchmark.common.evidence import Evidence
from benchmark.common.rounds import Series
from benchmark.common.variant import parse_variant


def make_series(name, throughputs, before=None, after=None):
    results = [
        {"output_throughput": speed, "median_tpot_ms": 1000 / speed, "median_ttft_ms": 5.0, "accept_length": None}
        for speed in throughputs
    ]
    evidence = [Evidence(before, after, None if before is None else 0.9, 10) for _ in throughputs]
    return Series(parse_variant(name), [], results, evidence)


def test_spread_is_median_and_linear_quartiles():
    assert spread([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(2.0, 3.0, 4.0)
    assert spread([1.0, 2.0]) == Spread(1.25, 1.5, 1.75)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0)


def test_ratios_are_over_the_first_series_and_paired_by_round():
    # The second round was twice as slow for both: a paired ratio does not see it.
    off, on = summarize(
        [make_series("off", [100.0, 50.0, 90.0]), make_series("xshare", [150.0, 75.0, 180.0], 70.0, 30.0)]
    )
    assert off.paired_ratio == Spread(1.0, 1.0, 1.0)
    assert on.paired_ratio == Spread(1.5, 1.5, 1.75)
    assert (on.experts_before, on.experts_after, on.policy_steps) == (70.0, 30.0, 30)
    assert off.experts_after is None


def test_fit_of_points_on_a_line_and_of_too_few():
    x = [1.0, 2.0, 4.0, 5.0, 8.0]
    fit = fit_line(x, [5.0 + 2.0 * one for one in x])
    assert fit is not None
    assert (fit.slope, fit.intercept, fit.r_squared) == (pytest.approx(2.0), pytest.approx(5.0), pytest.approx(1.0))
    assert fit_line(x[:4], x[:4]) is None
    assert fit_line([1.0, 1.0, 2.0, 3.0, 4.0], x) is None
