"""A comparison: its table in the order of the ratio, its way through a record round by round, and its plot."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmark.common import comparison as module
from benchmark.common.comparison import Comparison, is_measured, measure, tabulate
from benchmark.common.evidence import Evidence
from benchmark.common.plot import plot_speed
from benchmark.common.record import Record
from benchmark.common.rounds import Series, Workload
from benchmark.common.variant import parse_variant

WORKLOAD = Workload(Path("models/large"), Path("texts"), rounds=3)


def result_of(speed, accept_length=None):
    times = {"median_tpot_ms": 1000 / speed, "median_ttft_ms": 5.0, "accept_length": accept_length}
    return {**times, "output_throughput": speed}


def make_series(name, speed, experts, accept_length=None, args=()):
    evidence = Evidence(None, None, None, 0) if experts is None else Evidence(77.5, experts, 0.888, 8)
    results = [result_of(speed * drift, accept_length) for drift in (0.9, 1.0, 1.1)]
    return Series(parse_variant(name, args), ["launch", name], results, [evidence] * 3)


@pytest.fixture
def comparison():
    series = [make_series("off", 60.0, None), make_series("oea", 80.0, 45.0, 2.5), make_series("xshare", 90.0, 38.4)]
    return Comparison(WORKLOAD, series, {"loss": ["1.500", "-", "1.625"]})


def test_rows_are_in_the_order_of_the_ratio_after_the_baseline(comparison):
    table = tabulate("title", [comparison])
    assert table.headings[-3:] == ["ratio", "accepted", "loss"]
    assert table.rows == [
        ["large", *[""] * 7],
        ["off", "60.0 [57.0, 63.0]", "16.7", "-", "-", "1.00 [1.00, 1.00]", "-", "1.500"],
        ["xshare", "90.0 [85.5, 94.5]", "11.1", "77.5 -> 38.4", "0.888", "1.50 [1.50, 1.50]", "-", "1.625"],
        ["oea", "80.0 [76.0, 84.0]", "12.5", "77.5 -> 45.0", "0.888", "1.33 [1.33, 1.33]", "2.50", "-"],
    ]
    assert "the other rows are in its order" in " ".join(table.note.split())
    assert "prove nothing" not in table.note
    assert "Selected in no step" not in table.note


def test_one_round_says_that_it_proves_nothing(comparison):
    for one in comparison.series:
        one.results, one.evidence = one.results[:1], one.evidence[:1]
    assert tabulate("title", [comparison]).note.endswith("One round shows no spread: its differences prove nothing.")


@pytest.mark.parametrize("policy", ["xshare", "oea"])
def test_a_policy_that_selected_in_no_step_is_named(comparison, policy):
    (one,) = [one for one in comparison.series if one.variant.name == policy]
    one.evidence = [Evidence(None, None, None, 0)] * 3
    table = tabulate("title", [comparison, comparison])
    assert table.note.endswith(f"Selected in no step, so that the row shows nothing of the policy: {policy}.")


def test_vanilla_and_off_are_not_expected_to_select():
    series = [make_series("off", 60.0, None), make_series("vanilla", 60.0, None)]
    assert "Selected in no step" not in tabulate("title", [Comparison(WORKLOAD, series)]).note


def test_active_experts_of_a_server_without_policy_are_those_that_others_of_its_flags_found():
    drafts = ("--speculative-algorithm", "EAGLE3")
    series = [
        make_series("off", 60.0, None),
        make_series("vanilla", 60.0, None, args=drafts),
        make_series("xshare", 90.0, 38.4, args=drafts),
    ]
    assert Comparison(WORKLOAD, series).active == [None, 77.5, 38.4]
    assert Comparison(WORKLOAD, series[:1]).active == [None]


def test_it_comes_out_of_a_record_as_it_went_in(comparison):
    point = {"workload": asdict(WORKLOAD), "series": [asdict(one) for one in comparison.series]}
    found = Comparison.read(json.loads(json.dumps(point, default=str)), comparison.columns)
    assert found == comparison


@pytest.fixture
def rounds(monkeypatch):
    """Rounds take no time; each is noted by its number. Stopped before the number that is put into `stop`."""
    asked = SimpleNamespace(numbers=[], stop=99)

    def run_rounds(workload, series, servers):
        for number in range(len(series[0].results), workload.rounds):
            if number == asked.stop:
                raise KeyboardInterrupt
            asked.numbers.append(number)
            for one in series:
                one.results.append(result_of(10.0 + number))
                one.evidence.append(Evidence(None, None, None, 0))
            yield number

    monkeypatch.setattr(module, "run_rounds", run_rounds)
    return asked


def test_a_record_goes_on_at_the_round_it_lacks(tmp_path, rounds):
    variants = [parse_variant("off"), parse_variant("xshare")]
    record = Record(tmp_path, "serving", [])
    assert not is_measured(record, "key")
    rounds.stop = 2
    with pytest.raises(KeyboardInterrupt):
        measure(record, "key", WORKLOAD, variants, [])
    rounds.stop = 99
    again = Record(tmp_path, "serving", [])
    assert not is_measured(again, "key")
    comparison = measure(again, "key", WORKLOAD, variants, [])
    assert rounds.numbers == [0, 1, 2]
    assert [result["output_throughput"] for result in comparison.series[1].results] == [10.0, 11.0, 12.0]
    assert is_measured(again, "key")
    assert Comparison.read(again.points["key"]) == comparison


@pytest.mark.parametrize("count", [1, 3, 5])
def test_plot_is_a_picture_with_a_line_only_through_enough(tmp_path, monkeypatch, count):
    lines = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda *args, **options: lines.append(args[1]) or [])
    series = [make_series("off", 60.0, None), *(make_series(f"p{n}", 70.0 + n, 40.0 - n) for n in range(count - 1))]
    plot_speed(tmp_path / "plot.png", [Comparison(WORKLOAD, series)])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert len([line for line in lines if line[0] == 40.0 - count + 2]) == (2 if count == 5 else 0)


def test_no_line_through_what_cannot_be_compared(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmark.common.plot.fit_line", lambda x, y: pytest.fail("fitted"))
    flags = [make_series(f"p{n}", 70.0 + n, 40.0 - n, args=("--tp", str(n))) for n in range(6)]
    drafts = [make_series(f"p{n}", 70.0 + n, 40.0 - n, accept_length=2.0 + n) for n in range(6)]
    plot_speed(tmp_path / "plot.png", [Comparison(WORKLOAD, series) for series in (flags, drafts)])
