"""A comparison: its order and intervals, a policy that never selected, and its way through a record by rounds."""

from math import gamma, pi
from pathlib import Path

import numpy as np
import pytest
from common.made_up import NEVER, Rounds, make_series

from benchmark.common import comparison as module
from benchmark.common.comparison import Comparison, fit_line, is_measured, measure, summarize
from benchmark.common.evidence import Evidence
from benchmark.common.interval import Spread, find_quantile, format_spread, spread
from benchmark.common.record import Record
from benchmark.common.rounds import Workload, find_host, order_round
from benchmark.common.variant import parse_variant

WORKLOAD = Workload(Path("models/large"), Path("texts"), rounds=3)


def compare(*found):
    """Return the comparison of (name, speed, active experts, flags), whose speed drifts from round to round."""
    series = []
    for name, speed, experts, *args in found:
        evidence = NEVER if experts is None else Evidence(77.5, experts, 0.888, 8)
        series.append(make_series(parse_variant(name, args), [0.9 * speed, speed, 1.1 * speed], evidence))
    return Comparison(WORKLOAD, series)


def test_the_order_is_by_ratio_after_the_baseline_and_an_idle_policy_is_named():
    comparison = compare(("off", 60.0, None), ("oea", 80.0, 45.0), ("xshare", 90.0, 38.4), ("vanilla", 60.0, None))
    assert (comparison.order, comparison.idle) == ([0, 2, 1, 3], [])  # no server without a policy is expected to select
    comparison.series[1].evidence = [NEVER] * 3
    assert Comparison(WORKLOAD, comparison.series).idle == ["oea"]


def test_active_experts_of_a_server_without_policy_are_those_that_others_of_its_flags_found():
    drafts = "--speculative-algorithm", "EAGLE3"
    found = ("off", 60.0, None), ("vanilla", 60.0, None, *drafts), ("xshare", 90.0, 38.4, *drafts)
    assert compare(*found).active == [None, 77.5, 38.4]


def test_a_record_goes_on_at_the_round_it_lacks(tmp_path, monkeypatch):
    rounds = Rounds(stop=2)
    monkeypatch.setattr(module, "run_rounds", rounds)
    variants = [parse_variant("off"), parse_variant("xshare")]
    with pytest.raises(KeyboardInterrupt):
        measure(Record(tmp_path, "serving", []), "key", WORKLOAD, variants, [])
    rounds.stop = 3
    again = Record(tmp_path, "serving", [])
    assert not is_measured(again, "key")
    comparison = measure(again, "key", WORKLOAD, variants, [])
    assert [number for _, number in rounds.ran] == [0, 1, 2]
    assert [result["output_throughput"] for result in comparison.series[1].results] == [10.0, 11.0, 12.0]
    assert is_measured(again, "key")
    assert Comparison.read(again.points["key"]) == comparison


def test_the_interval_is_students():
    found = spread([5.0, 1.0, 3.0, 2.0, 4.0])
    assert (found.mean, found.median) == (3.0, 3.0)
    assert found.upper - 3.0 == pytest.approx(2.776 * (2.5 / 5) ** 0.5)
    assert spread([1.0, 2.0]).lower == pytest.approx(1.5 - 12.706 * 0.5)
    assert spread([7.0]) == Spread(7.0, 7.0, 7.0, 7.0)
    assert (format_spread(spread([7.0]), 1), format_spread(found, 2)) == ("7.0", "3.00 [1.04, 4.96]")


@pytest.mark.parametrize("freedom", [*range(1, 13), 20, 120])
def test_a_quantile_leaves_a_fortieth_of_the_distribution(freedom):
    values = np.linspace(0, find_quantile(freedom), 10_001)
    scale = gamma((freedom + 1) / 2) / gamma(freedom / 2) / (pi * freedom) ** 0.5
    half = np.trapezoid(scale * (1 + values**2 / freedom) ** (-(freedom + 1) / 2), values)
    assert half == pytest.approx(0.475, abs=2.5e-5)


@pytest.mark.parametrize("count", [3, 4, 10])
def test_the_baseline_runs_between_others(count):
    orders = [order_round(count, number) for number in range(8)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert all(0 < order.index(0) < count - 1 for order in orders)
    assert len({order[0] for order in orders}) >= min(count - 1, 4)
    assert [order_round(2, number) for number in range(3)] == [[1, 0], [0, 1], [1, 0]]


def test_vanilla_shares_the_policys_server_unless_it_is_the_baseline():
    def hosts(*names):
        variants = [parse_variant(name) for name in names]
        return [find_host(variants, number) for number in range(len(variants))]

    assert hosts("off", "vanilla", "xshare", "oea:k0=3") == [0, 2, 2, 2]
    assert hosts("vanilla", "xshare", "vanilla") == [0, 1, 1]
    assert hosts("off", "vanilla") == [0, 1]


def test_ratios_are_over_the_first_series_and_paired_by_round():
    # The second round was twice as slow for both: a paired ratio does not see it.
    policy = make_series("xshare", [150.0, 75.0, 180.0], Evidence(70.0, 30.0, 0.9, 10))
    off, on = summarize([make_series("off", [100.0, 50.0, 90.0]), policy])
    assert (off.ratios, off.experts_after) == ([1.0, 1.0, 1.0], None)
    assert (on.ratios, on.paired_ratio.mean) == ([1.5, 1.5, 2.0], pytest.approx(5 / 3))
    assert (on.experts_before, on.experts_after, on.policy_steps) == (70.0, 30.0, 30)


def test_fit_of_points_on_a_line_and_of_too_few():
    x = [1.0, 2.0, 4.0, 5.0, 8.0]
    fit = fit_line(x, [5.0 + 2.0 * one for one in x])
    assert fit is not None
    assert (fit.slope, fit.intercept, fit.r_squared) == (pytest.approx(2.0), pytest.approx(5.0), pytest.approx(1.0))
    assert fit_line([1.0, 1.0, 2.0, 3.0, 4.0], x) is None
