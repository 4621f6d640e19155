"""What the micro-benchmarks compute from their timings, and that they measure what they name."""

import json

import pytest

from benchmark.common.variant import parse_variant
from benchmark.kernels.selection import main as measure_selection
from benchmark.stage.__main__ import summarize, time_routing


def test_the_stages_cost_is_what_it_adds_to_vanilla():
    routing = {"vanilla": [4e-4, 3e-4, 9e-4], "xshare": [8e-4, 1e-3, 9e-4]}
    vanilla, xshare = summarize(routing, step=0.05, layers=4)
    assert (vanilla["layer_us"], vanilla["added_us"], vanilla["share_of_step"]) == pytest.approx((100, 0, 0))
    assert (xshare["layer_us"], xshare["added_us"], xshare["share_of_step"]) == pytest.approx((225, 125, 0.01))


def test_the_stages_routing_really_runs():
    config = {"num_hidden_layers": 2, "num_experts": 16, "num_experts_per_tok": 4}
    variants = [parse_variant(text) for text in ("vanilla", "xshare:k0=1,add=4", "oea:k0=2")]
    seconds = time_routing(variants, config, rows=4, rounds=2)
    assert {name: len(spent) for name, spent in seconds.items()} == {variant.name: 2 for variant in variants}
    assert all(second > 0 for spent in seconds.values() for second in spent)


def test_selection_is_timed_on_every_backend_beside_upstreams_router(tmp_path, capsys):
    out = tmp_path / "selection.json"
    policy = "xshare:k0=1,add=4"
    assert measure_selection([policy, "--shapes", "4x16", "8x32", "--rounds", "2", "--out", str(out)]) == 0
    timings = json.loads(out.read_text())["timings"]
    wanted = [("upstream", "upstream"), (policy, "reference"), (policy, "torch")]
    assert [(one["plan"], one["backend"]) for one in timings] == wanted * 2
    assert all(len(one["rounds"]) == 2 and min(one["rounds"]) > 0 for one in timings)
    assert "8x32" in capsys.readouterr().out


def test_selection_of_an_unknown_policy_is_one_line(capsys):
    with pytest.raises(SystemExit):
        measure_selection(["nope"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("lynx-lat, lynx-acc, moe-spec, custom")
