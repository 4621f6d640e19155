"""The estimate beside what was served: on figures that can be checked by hand."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmark.common.evidence import Evidence
from benchmark.common.rounds import Series, Workload
from benchmark.common.variant import parse_variant
from benchmark.serving.report import KEY, tabulate_estimate


def make_series(name, tpot_ms, experts_after):
    """A series of three rounds."""
    results = [
        {"output_throughput": 1000 / one, "median_tpot_ms": one, "median_ttft_ms": 5.0, "accept_length": None}
        for one in tpot_ms
    ]
    evidence = Evidence(None, None, None, 0)
    if experts_after is not None:
        evidence = Evidence(80.0, experts_after, 0.9, 9)
    return Series(parse_variant(name), [], results, [evidence] * len(results))


def test_a_policy_s_time_is_set_beside_the_bytes_it_reads():
    drafted = make_series("xshare:k0=2", [100.0, 80.0, 50.0], 40.0)
    series = [
        make_series("vanilla", [200.0, 100.0, 100.0], None),
        make_series("oea:k0=3", [200.0, 100.0, 100.0], 80.0),
        make_series("xshare", [100.0, 80.0, 50.0], 40.0),  # paired: 0.5, 0.8, 0.5
        make_series("lynx-lat", [300.0, 300.0, 300.0], None),  # it selected in no step
        replace(drafted, variant=replace(drafted.variant, args=("--drafts",))),  # its steps read a draft, too
    ]
    point = {"workload": asdict(Workload(Path("model"), Path("texts"), rounds=3)), "series": [*map(asdict, series)]}
    rows = tabulate_estimate({KEY: point}).rows
    expert, heads = 3 * 128 * 64 * 32, 128 * (4 + 2 * 2 + 4) * 64
    dense = 4 * (heads + 128 * 64) + 128 * 1024
    share = (dense + 4 * 40 * expert) / (dense + 4 * 80 * expert)
    assert rows == [
        ["xshare", "80.0 -> 40.0", "0.50", f"{share:.2f}", f"{share / 0.5 - 1:+.0%}"],
        ["oea:k0=3", "80.0 -> 80.0", "1.00", "1.00", "+0%"],
    ]
    assert share == pytest.approx(0.5, abs=0.03)
