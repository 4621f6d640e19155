"""The table, the record and the plot, of made-up figures."""

import json
import math
from pathlib import Path

import pytest

from benchmark.common.evidence import Evidence
from benchmark.common.rounds import Series, Workload
from benchmark.common.variant import parse_variant
from benchmark.serving.report import Comparison, print_table, write_plot, write_record


def make_series(name, speed, experts, accept_length=None):
    result = {"median_tpot_ms": 1000 / speed, "median_ttft_ms": 5.0, "accept_length": accept_length}
    evidence = Evidence(None, None, None, 0, 9) if experts is None else Evidence(77.5, experts, 0.888, 8, 1)
    results = [{**result, "output_throughput": speed * drift} for drift in (0.9, 1.0, 1.1)]
    return Series(parse_variant(name), ["launch", name], results, [evidence] * 3)


@pytest.fixture
def comparison():
    series = [make_series("off", 60.0, None), make_series("xshare", 90.0, 38.4), make_series("oea", 80.0, 45.0, 2.5)]
    return Comparison(Workload(Path("models/large"), Path("texts")), series, {"loss": [1.5, 1.625, None]})


def test_table_says_what_was_measured(comparison, capsys):
    print_table("title", [comparison])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["off", "60.0", "[57.0,", "63.0]", "16.7", "-", "-", "1.00", "[1.00,", "1.00]", "-", "1.500"] in rows
    assert [
        "xshare",
        "90.0",
        "[85.5,",
        "94.5]",
        "11.1",
        "77.5",
        "->",
        "38.4",
        "0.888",
        "1.50",
        "[1.50,",
        "1.50]",
        "-",
        "1.625",
    ] in rows
    assert [
        "oea",
        "80.0",
        "[76.0,",
        "84.0]",
        "12.5",
        "77.5",
        "->",
        "45.0",
        "0.888",
        "1.33",
        "[1.33,",
        "1.33]",
        "2.50",
        "-",
    ] in rows


def test_record_holds_every_round_and_where_it_ran(comparison, tmp_path):
    write_record(tmp_path / "new" / "record.json", ["bench", "off"], [comparison])
    record = json.loads((tmp_path / "new" / "record.json").read_text())
    assert record["hardware"]["cores"] >= 1
    assert record["versions"]["sglang"]
    (found,) = record["comparisons"]
    assert [len(series["results"]) for series in found["series"]] == [3, 3, 3]
    assert found["series"][1]["command"] == ["launch", "xshare"]
    assert found["summary"][1]["paired_ratio"]["median"] == 1.5
    assert found["quality"] == {"loss": [1.5, 1.625, None]}
    # (77.5, 60), (38.4, 90), (45, 80): least squares by hand.
    assert math.isclose(found["fit"]["throughput"]["slope"], -0.71863, rel_tol=1e-4)


def test_plot_is_a_picture(comparison, tmp_path):
    write_plot(tmp_path / "plot.png", "title", [comparison, comparison])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
