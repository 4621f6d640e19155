"""`sglang-xshare estimate`: bytes counted by hand, its formula against what was measured, and bad input."""

import json
import re

import pytest

from benchmark.common.paths import ROOT
from benchmark.gpu import moe_layer
from benchmark.gpu.models import COMMON, CONFIGS
from sglang_xshare.cli import main
from sglang_xshare.estimate.active import COMMON as ASSUMED
from sglang_xshare.estimate.active import draw_loads
from sglang_xshare.estimate.command import HIGHEST
from sglang_xshare.estimate.latency import estimate_step
from sglang_xshare.estimate.weights import read_weights
from sglang_xshare.gpus import GPUS
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.stage.evidence.balance import RankLoad, format_balance
from sglang_xshare.stage.evidence.figures import PREFIX

TINY = ROOT / "checkpoints" / "qwen3-moe-tiny"
PAGE = (ROOT / "docs" / "check.md").read_text()
QWEN = COMMON | CONFIGS["qwen3-30b-a3b"]
OEA = {"vanilla": (48.8, 175.7), "oea:k0=5": (35.1, 136.0), "oea:k0=3": (25.1, 106.8)}
"""OEA, Tables 3 and 4: active experts, and us of one MoE layer of Qwen3-30B-A3B in bf16 on an H100, 16 rows."""
H100 = GPUS["h100"].bandwidth * 1e9


@pytest.fixture
def write(tmp_path):
    """Call it with a configuration for the folder that holds it."""

    def write_config(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write_config


def say(*arguments):
    """Run the command with these; returns its exit code."""
    return main(["estimate", *map(str, arguments)])


def test_the_bytes_of_qwen3_30b_a3b(write):
    weights = read_weights(write(QWEN))
    assert weights.expert == 3 * 2048 * 768 * 2 == 9437184
    assert weights.moe_layers == 48
    attention = 2048 * (32 + 2 * 4 + 32) * 128
    assert weights.dense == (48 * (attention + 2048 * 128) + 2048 * 151936) * 2
    assert weights.cache == 48 * 2 * 4 * 128 * 2


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
    ],
)
def test_bits_a_weight_by_quantization(quantization, bits, write):
    weights = read_weights(write(QWEN | {"quantization_config": quantization}))
    assert (weights.bits, weights.expert) == (bits, 3 * 2048 * 768 * bits / 8)


def test_mxfp4_holds_experts_alone(write):
    plain = read_weights(write(QWEN)).dense
    assert read_weights(write(QWEN | {"quantization_config": {"quant_method": "mxfp4"}})).dense == plain
    assert read_weights(write(QWEN | {"quantization_config": {"quant_method": "fp8"}})).dense < plain


def test_dense_layers_and_shared_experts_are_counted(write):
    base = read_weights(write(QWEN))
    some = read_weights(write(QWEN | {"mlp_only_layers": [0, 5]}))
    assert some.moe_layers == 46
    assert some.dense - base.dense == 2 * (3 * 2048 * 6144 - 2048 * 128) * 2
    shared = read_weights(write(QWEN | {"shared_expert_intermediate_size": 512}))
    assert shared.dense - base.dense == 48 * 3 * 2048 * 512 * 2
    assert read_weights(write(QWEN | {"decoder_sparse_step": 2})).moe_layers == 24
    assert read_weights(write(QWEN | {"first_k_dense_replace": 3})).moe_layers == 45


def test_a_step_is_its_layers_and_the_rest(write):
    weights = read_weights(write(QWEN))
    step = estimate_step(weights, 40, 16 * 1024, H100)
    assert step.layer == pytest.approx(34e-6 + 40 * 9437184 / (0.97 * H100))
    assert step.rest == pytest.approx((weights.dense + 16 * 1024 * weights.cache) / (0.97 * H100))
    assert step.step == pytest.approx(48 * step.layer + step.rest)


def test_the_page_states_how_far_the_layer_is_from_oea_s_table(write):
    """OEA's own points, from which the constants are: that they are near shows the line, and no more."""
    for policy, (active, measured) in OEA.items():
        estimated = estimate_step(read_weights(write(QWEN)), active, 0, H100).layer * 1e6
        row = f"| {policy} | {active} | {measured} | {estimated:.1f} | {estimated / measured - 1:+.1%} |"
        assert row in PAGE, row
        assert abs(estimated / measured - 1) < 0.01


def test_drawn_rows_are_as_active_as_oea_counted(write):
    assert ASSUMED == moe_layer.COMMON
    model = read_weights(write(QWEN)).model
    for text, k0 in (("oea:k0=3", 3), ("oea:k0=5", 5)):
        drawn = draw_loads(build_schedule("oea", {"k0": k0}, False), model, 16, 1, ASSUMED)
        assert drawn.before.active == pytest.approx(OEA["vanilla"][0], abs=1.5)
        assert drawn.after.active == pytest.approx(OEA[text][0], abs=1.5)


def test_independent_rows_wake_as_many_as_chance(write):
    model = read_weights(write(QWEN)).model
    drawn = draw_loads(build_schedule("oea", {"k0": 3}, False), model, 16, 1, 0.0)
    assert drawn.before.active == pytest.approx(128 * (1 - (1 - 8 / 128) ** 16), rel=0.02)


def test_every_row_and_the_title_say_estimate(write, capsys):
    asked = ("--model", write(QWEN), "--gpu", "h200", "--batch", 16, "xshare:k0=1,add=24")
    assert say(*asked) == 0
    out = capsys.readouterr().out
    assert out.startswith("ESTIMATE, not a measurement\n")
    rows = [line for line in out.splitlines() if "->" in line]
    assert len(rows) == 2
    assert all(re.match(r" ?estimate, assumed: .* xshare:k0=1,add=24 ", row) for row in rows)
    assert say(*asked, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["is_estimate"] is True
    assert [row["is_estimate"] for row in report["estimates"]] == [True, True]
    assert report["bandwidth_gb_per_s"] == 4800


def test_active_experts_and_bandwidth_as_given(write, capsys):
    asked = ("--model", write(QWEN), "--batch", 16, "--bandwidth", 3350, "--active", 48.8, 25.1, "--json")
    assert say(*asked) == 0
    (row,) = json.loads(capsys.readouterr().out)["estimates"]
    assert row["active_experts"] == [48.8, 25.1]
    weights = read_weights(write(QWEN))
    assert row["moe_layer_us"] == [estimate_step(weights, n, 0, H100).layer * 1e6 for n in (48.8, 25.1)]
    assert row["speedup"] == pytest.approx(row["step_ms"][0] / row["step_ms"][1])
    assert row["speedup"] > 1


def test_active_experts_of_a_trace(write, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    lines = [(16, 50, 30), (16, 60, 20), (8, 40, 10)]
    trace.write_text(
        "".join(json.dumps({"batch_size": n, "experts_before": b, "experts_after": a}) + "\n" for n, b, a in lines)
    )
    asked = ("--model", write(QWEN), "--gpu", "h100", "--trace", trace, "--json")
    assert say(*asked, "--batch", 16) == 0
    (row,) = json.loads(capsys.readouterr().out)["estimates"]
    assert row["active_experts"] == [55, 25]
    assert say(*asked, "--batch", 4) == 1
    assert capsys.readouterr().err == f"estimate: --trace {trace}: no step of 4 rows; it has 8, 16\n"


def test_a_trace_of_observe_has_each_plans_experts_and_any_other_says_whose_they_are(write, tmp_path, capsys):
    line = {"step": 0, "phase": "decode", "layer": 0, "batch_size": 16, "experts_before": 50, "kept_mass": 1.0}
    trace = tmp_path / "trace.jsonl"
    asked = ("--model", write(QWEN), "--gpu", "h100", "--trace", trace, "--batch", 16, "--json")
    observed = {"oea:k0=3": {"experts_after": 30, "kept_mass": 0.9}}
    trace.write_text(json.dumps(line | {"experts_after": 50, "plans": observed}) + "\n")
    assert say(*asked, "oea:k0=3") == 0
    (row,) = json.loads(capsys.readouterr().out)["estimates"]
    assert (row["active_experts"], row["source"]) == ([50, 30], f"trace {trace}")
    assert say(*asked, "oea:k0=2") == 1
    assert f"not among the plans that --trace {trace} observed: oea:k0=3" in capsys.readouterr().err
    trace.write_text(json.dumps(line | {"experts_after": 35}) + "\n")
    assert say(*asked, "oea:k0=3") == 0
    (row,) = json.loads(capsys.readouterr().out)["estimates"]
    assert row["source"] == f"trace {trace}, as its server's policy kept, whatever POLICY says"


def ask(write, capsys, *more):
    """What is told of xshare on 32 requests, as JSON."""
    asked = ("--model", write(QWEN), "--gpu", "h200", "--batch", 32, "--json")
    assert say(*asked, *more, "xshare:k0=1,add=24") == 0
    return json.loads(capsys.readouterr().out)["estimates"]


def test_ranks_share_the_experts(write, capsys):
    one, eight = (ask(write, capsys, "--ep-size", ranks)[0] for ranks in (1, 8))
    assert one["fullest_rank_experts"] == one["active_experts"] == eight["active_experts"]
    assert one["active_experts"][0] / 8 < eight["fullest_rank_experts"][0] < one["active_experts"][0] / 2
    assert eight["step_ms"][0] < one["step_ms"][0]


@pytest.mark.parametrize(("batch", "most"), [(8, 1), (9, 2), (16, 2)])
def test_a_step_waits_for_the_rank_with_most_whole_requests(batch, most, write, capsys):
    (row,) = ask(write, capsys, "--ep-size", 8, "--batch", batch, "--active", 10, 5)
    step = estimate_step(read_weights(write(QWEN)), 10, most * 1024, 4.8e12)
    assert row["step_ms"][0] == pytest.approx(step.step * 1e3)


def test_what_is_known_of_the_fullest_rank_is_not_the_models(write, capsys):
    (row,) = ask(write, capsys, "--active", 10, 5, "--ep-size", 8)
    assert (row["active_experts"], row["fullest_rank_experts"]) == (None, [10, 5])
    flags = ("--gpu", "h200", "--batch", 32, "--active", 10, 5, "--ep-size", 8)
    assert say("--model", write(QWEN), *flags) == 0
    out = capsys.readouterr().out
    assert out.count("10.0 -> 5.0") == 1
    assert "of the fullest rank" in out


def test_the_fullest_rank_is_counted_where_the_page_says(write, capsys):
    """Its line is the decode log's, and the numbers that it takes from there are taken."""
    load = RankLoad(10, largest_before=247, largest_after=95, mean_before=214, mean_after=91)
    assert format_balance(load) in PAGE
    assert f"{PREFIX}fullest_rank_active_experts_before" in PAGE
    counted = re.search(r"here\s+`--active ([\d.]+) ([\d.]+)`", PAGE).groups()
    assert "{} -> {}".format(*counted) in format_balance(load)
    (row,) = ask(write, capsys, "--ep-size", 4, "--active", *counted)
    assert row["fullest_rank_experts"] == [24.7, 9.5]


def test_every_policy_has_its_rows(write, capsys):
    rows = ask(write, capsys, "oea:k0=3")
    assert [row["policy"] for row in rows] == ["oea:k0=3"] * 2 + ["xshare:k0=1,add=24"] * 2
    assert rows[2:] == ask(write, capsys)


NO_POLICY = "cannot be served with an expert policy"
BAD = {
    "unknown GPU": (
        ("--gpu", "h101"),
        f"--gpu h101: not known; allowed is {', '.join(GPUS)}",
    ),
    "no GPU": ((), f"--gpu is missing; allowed is one of {', '.join(GPUS)}, or --bandwidth"),
    "a batch of none": (("--gpu", "h100", "--batch", "0"), "--batch 0: allowed is 1 to 1,000,000,000"),
    "more rows than are drawn": (
        ("--gpu", "h100", "--batch", "100000000"),
        "--batch 100000000: a step of 100,000,000 rows: allowed are at most 16,384 without --active or --trace",
    ),
    "a number without end": (
        ("--gpu", "h100", "--context", "1" + "0" * 400, "--active", "8", "4"),
        f"--context 1{'0' * 400}: allowed is 0 to 1,000,000,000",
    ),
    "a bandwidth without end": (("--bandwidth", "inf"), "--bandwidth inf: allowed is 0.001 to 1,000,000,000"),
    "a bandwidth that is none": (("--bandwidth", "nan"), "--bandwidth nan: allowed is 0.001 to 1,000,000,000"),
    "ranks that do not divide the experts": (
        ("--gpu", "h100", "--ep-size", "24"),
        "--ep-size 24: allowed is a divisor of the 64 experts",
    ),
    "more active than a rank has": (
        ("--gpu", "h100", "--ep-size", "8", "--active", "9", "4"),
        "--active 9: allowed is 1 to a rank's 8 experts",
    ),
    "a trace for ranks": (
        ("--gpu", "h100", "--ep-size", "8", "--trace", "x"),
        "--trace with --ep-size: it tells no rank's experts; allowed is --active, the fullest's",
    ),
    "experts of several policies": (
        ("--gpu", "h100", "xshare", "oea:k0=3", "--active", "40", "20"),
        "--active with 2 policies: allowed is the one whose experts they are",
    ),
    "a policy that does not fit": (
        ("--gpu", "h100", "oea:k0=9"),
        "oea:k0=9: k0 = 9: allowed is at most the model's top-k, 8",
    ),
    "a value that is none": (
        ("--gpu", "h100", "oea:k0=x"),
        "oea:k0=x: k0 = 'x': allowed is an integer of at least 1",
    ),
    "a policy of verification alone": (
        ("--gpu", "h100", "moe-spec:budget=32"),
        "moe-spec:budget=32: moe-spec without speculative decoding: it selects in target-verify; "
        'allowed is --draft-tokens N above 1, or phases = ["decode"]',
    ),
    "vanilla": (
        ("--gpu", "h100", "vanilla"),
        "vanilla: routes as the model does, which the estimate compares with; allowed is another policy",
    ),
    "a batch that stays vanilla": (
        ("--gpu", "h100", "--batch", "1"),
        "--batch: a step of 1 rows stays vanilla (min_tokens); allowed is one in which it selects",
    ),
    "more active than there are": (
        ("--gpu", "h100", "--active", "65", "10"),
        "--active 65: allowed is 1 to the model's 64 experts",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, capsys):
    more, line = BAD[case]
    assert say("--model", TINY, "--batch", 16, *more) == 1
    assert capsys.readouterr() == ("", f"estimate: {line}\n")


@pytest.mark.parametrize("end", ["low", "high"])
def test_the_ends_of_what_is_allowed_are_estimated(end, capsys):
    """All counts, and all rates: the longest step there is, then the shortest."""
    counts, rate, policy = (
        (HIGHEST, 0.001, "moe-spec:budget=32") if end == "high" else (2, HIGHEST, "xshare:k0=1,add=8")
    )
    flags = ["--batch", counts, "--draft-tokens", counts - 1, "--context", counts, "--bandwidth", rate]
    flags += ["--ep-size", 2, "--active", 8, 4, policy, "--json"]
    assert say("--model", TINY, *flags) == 0, capsys.readouterr().err
    (row,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["estimates"]
    assert min(row["step_ms"]) > 0


def test_a_model_that_cannot_be_estimated_is_one_line(write, tmp_path, capsys):
    asked = ("--gpu", "h100", "--batch", 16)
    assert say("--model", tmp_path / "nowhere", *asked) == 1
    assert "config.json: No such file or directory; allowed is a model's folder" in capsys.readouterr().err
    dense = QWEN | {"architectures": ["Qwen3ForCausalLM"], "num_experts": None}
    assert say("--model", write(dense), *asked) == 1
    assert capsys.readouterr().err == (
        f"estimate: --model {tmp_path}: {NO_POLICY}: Qwen3ForCausalLM is a dense model; "
        "allowed are Mixture-of-Experts models\n"
    )
    assert say("--model", write(QWEN | {"quantization_config": {"quant_method": "odd"}}), *asked) == 1
    assert "quant_method odd is not known; allowed is none, fp8, mxfp4" in capsys.readouterr().err
    assert say("--model", write({k: v for k, v in QWEN.items() if k != "vocab_size"}), *asked) == 1
    assert "config.json lacks 'vocab_size'" in capsys.readouterr().err
