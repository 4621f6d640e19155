"""Policies that verify drafts: their table, and what the command says of bad input."""

from dataclasses import asdict

import pytest

from benchmark.common.evidence import Evidence
from benchmark.common.rounds import Series, Workload
from benchmark.common.speculative import drafting_variant
from benchmark.common.variant import OFF, Variant, parse_variant
from benchmark.speculation.__main__ import main
from benchmark.speculation.report import ROUNDS, SUMS, loss_key, tabulate_speculation


def measured(delta):
    return {"mixed": {"loss": {"all": {"cross_entropy": 2.0, "delta": delta, "error": 0.001}}}}


def series_of(variant, speed, accept_length):
    result = {
        "output_throughput": speed,
        "median_tpot_ms": 10.0,
        "median_ttft_ms": 5.0,
        "accept_length": accept_length,
    }
    return asdict(Series(variant, ["launch"], [result], [Evidence(60.0, 40.0, 0.9, 8, 1)]))


def test_every_row_has_its_own_loss_and_sums(tmp_path):
    drafting = [drafting_variant(parse_variant(text), ("--draft",)) for text in ("vanilla", "xshare", "oea:k0=3")]
    speeds = [(Variant(OFF, None, {}), 100.0, None), *zip(drafting, (110.0, 130.0, 120.0), (2.5,) * 3, strict=True)]
    points = {
        ROUNDS: {
            "workload": asdict(Workload(tmp_path / "model", tmp_path, rounds=1)),
            "series": [series_of(*one) for one in speeds],
        },
        SUMS: {"shares": [1.0, 0.99, None, 0.5]},
        loss_key("vanilla"): measured(0.0),
        loss_key("xshare"): measured(0.004),
        loss_key("oea:k0=3"): measured(0.002),
    }
    rows = {row[0]: row[-3:] for row in tabulate_speculation(points).rows}
    assert list(rows) == ["model", "off", "EAGLE-3, xshare", "EAGLE-3, oea:k0=3", "EAGLE-3, vanilla"]
    assert rows["off"] == ["-", "100.0%", "-"]
    assert rows["EAGLE-3, vanilla"] == ["2.50", "99.0%", "0"]
    assert rows["EAGLE-3, xshare"] == ["2.50", "-", "+4.0 ± 1.0"]
    assert rows["EAGLE-3, oea:k0=3"] == ["2.50", "50.0%", "+2.0 ± 1.0"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["xshare", "vanilla"], "policies xshare vanilla: each may be given once, and vanilla is there already"),
        (["xshare", "xshare"], "policies xshare xshare: each may be given once"),
        (["--draft", "/nowhere"], "argument --draft: /nowhere is no folder"),
        (["--model", "/nowhere"], "argument --model: /nowhere is no folder"),
        (["--topk", "0"], "argument --topk: '0': allowed is a whole number above 0"),
    ],
)
def test_bad_input_is_one_line(args, message):
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert message in str(stop.value.code)
    assert "\n" not in str(stop.value.code)
