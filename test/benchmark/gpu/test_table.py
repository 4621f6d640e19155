"""The table of recorded figures: published summaries are those of their records, and a bar within the error is open."""

import shutil

import pytest
from common.made_up import make_point, make_series

from benchmark.common.comparison import Comparison
from benchmark.common.paths import RESULTS
from benchmark.common.record import Record
from benchmark.gpu.serving import gain_row, list_percents
from benchmark.gpu.table import at_least, list_rows, show_table
from benchmark.records.tables import H200_RUN


def list_lines(summary):
    """Return the lines of a summary, without the checks of the machine."""
    return [line for line in summary.read_text().splitlines() if not line.startswith("| run |")]


@pytest.mark.parametrize("run", [H200_RUN, "2026-11-27-nvidia-h200"])
def test_a_published_summary_is_that_of_its_records(run, tmp_path):
    shutil.copytree(RESULTS / run, tmp_path / "run")
    show_table(tmp_path / "run")
    assert list_lines(tmp_path / "run" / "summary.md") == list_lines(RESULTS / run / "summary.md")


def test_a_bar_within_the_error_is_open():
    found = [at_least("gain", value, 5.4, "%", 2.0) for value in (3.3, 3.5, 7.3, 7.5)]
    assert [row.verdict for row in found] == ["miss", "open", "open", "pass"]
    assert found[0].measured == "3.3 ± 2.0 %"
    unknown = at_least("gain", 50.0, 5.4, "%", None)
    assert (unknown.measured, unknown.verdict) == ("50.0 ± unknown %", "open")
    assert at_least("gain", 50.0, None, "%", None).verdict == ""


def test_the_error_is_the_t_interval_of_the_rounds_ratios():
    def read(*speeds):
        return Comparison.read(make_point([make_series("off", [100.0] * len(speeds)), make_series("xshare", speeds)]))

    comparison = read(109.0, 110.0, 114.0)
    assert list_percents(comparison) == pytest.approx([9.0, 10.0, 14.0])
    # of 9, 10 and 14: variance 7, and 4.303 * sqrt(7 / 3) = 6.57
    assert gain_row(comparison, "it", 9.0).measured == "11.0 ± 6.6 % gain"
    assert [gain_row(comparison, "it", bar).verdict for bar in (9.0, 18.0)] == ["open", "miss"]
    assert gain_row(read(110.0), "it", 9.0).measured == "10.0 ± unknown % gain"


def test_a_record_that_cannot_be_read_is_a_miss_among_the_others(tmp_path):
    Record(tmp_path, "layer", []).add("copy", gb_per_s=4000.0)
    (tmp_path / "server.json").write_text("{")
    Record(tmp_path, "replay", []).add("tests")
    found = dict(list_rows(tmp_path))
    assert (found["server"].what, found["server"].verdict) == ("its record", "miss")
    assert (found["replay"].measured, found["layer"].measured) == ("KeyError: 'passed'", "4000 GB/s")
