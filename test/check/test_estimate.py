"""What `sglang-xshare check` tells without SGLang: bytes counted by hand, memory, the estimate, and bad input."""

import json
import os
import re
import subprocess
import sys

import pytest

from benchmark.common.paths import ROOT
from benchmark.gpu import moe_layer
from benchmark.gpu.models import COMMON, CONFIGS
from refused import read_refusal
from sglang_xshare.check import command
from sglang_xshare.check.active import draw_loads
from sglang_xshare.check.estimate import estimate_step
from sglang_xshare.check.flags import LARGEST
from sglang_xshare.check.loads import COMMON as ASSUMED
from sglang_xshare.check.weights import read_weights
from sglang_xshare.cli import main
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


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """SGLang is not asked: it would serve."""
    monkeypatch.setattr(command, "_judge", lambda *_: ({"sglang": None, "gpu": "a GPU", "served": True}, None))


def say(*arguments):
    """Run the command with these; returns its exit code."""
    return main(["check", *map(str, arguments)])


def read_rows(capsys):
    """The estimates of what was said as JSON."""
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["estimate"]["estimates"]


def compare(*policies):
    """The flags that compare them."""
    return [word for policy in policies for word in ("--compare", policy)]


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
    layer, step = estimate_step(weights, 40, 16 * 1024, H100)
    assert layer == pytest.approx(34e-6 + 40 * 9437184 / (0.97 * H100))
    assert step == pytest.approx(48 * layer + (weights.dense + 16 * 1024 * weights.cache) / (0.97 * H100))


def test_the_page_states_how_far_the_layer_is_from_oea_s_table(write):
    """OEA's own points, from which the constants are: that they are near shows the line, and no more."""
    for policy, (active, measured) in OEA.items():
        estimated = estimate_step(read_weights(write(QWEN)), active, 0, H100)[0] * 1e6
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


def test_as_many_are_active_of_independent_rows_as_by_chance(write):
    model = read_weights(write(QWEN)).model
    drawn = draw_loads(build_schedule("oea", {"k0": 3}, False), model, 16, 1, 0.0)
    assert drawn.before.active == pytest.approx(128 * (1 - (1 - 8 / 128) ** 16), rel=0.02)


def test_a_policy_has_a_row_with_the_range_of_what_is_assumed(write, capsys):
    asked = ("--model", write(QWEN), "--gpu", "h200", "--batch", 16, *compare("xshare:k0=1,add=24", "oea:k0=3"))
    assert say(*asked) == 0
    out = capsys.readouterr().out
    assert "ESTIMATE, not a measurement" in out
    assert say(*asked, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["estimate"]["bandwidth_gb_per_s"] == 4800
    rows = report["estimate"]["estimates"]
    pair = [(row["policy"], row["source"]) for row in rows]
    sources = "assumed: agreeing", "assumed: independent"
    assert pair == [(policy, source) for policy in ("xshare:k0=1,add=24", "oea:k0=3") for source in sources]
    for first, side in ((0, 0), (0, 1), (2, 1)):
        agreeing, independent = rows[first : first + 2]
        assert all(row["is_estimate"] for row in (agreeing, independent))
        assert agreeing["tokens_per_s"][side] == pytest.approx(16 / agreeing["step_ms"][side] * 1e3)
        cells = [f"{row['tokens_per_s'][side]:,.0f}" for row in (agreeing, independent)]
        masses = [f"{row['kept_mass']:.3f}" for row in (agreeing, independent)]
        (line,) = [line for line in out.splitlines() if " - ".join(cells) in line]
        assert line.split()[0] == ("vanilla" if side == 0 else agreeing["policy"])
        assert "1.000" in line if side == 0 else " - ".join(masses) in line


def test_what_is_assumed_and_what_to_believe_is_said(write, capsys):
    asked = ("--gpu", "h200", "--batch", 16, *compare("xshare:k0=1,add=24", "oea:k0=3", "oea:k0=4"))
    said = {}
    for name in ("qwen3-30b-a3b", "gpt-oss-120b", "gpt-oss-20b"):
        assert say("--model", write(COMMON | CONFIGS[name]), *asked) == 0
        said[name] = " ".join(capsys.readouterr().out.split())
    assumed = "which is assumed of this model: nobody has measured it"
    assert [name for name, text in said.items() if assumed in text] == ["gpt-oss-120b", "gpt-oss-20b"]
    ours = "Published of xshare:k0=1,add=24 on this model: gpt-oss-120b, batch 16: +7 to 13 % tokens/s"
    assert [name for name, text in said.items() if ours in text] == ["gpt-oss-120b"]
    assert "It says more than the estimate" in said["gpt-oss-120b"]
    assert "of oea:k0=3 on this model: Qwen3-30B-A3B (top-8), batch 16: MoE layer" in said["qwen3-30b-a3b"]
    assert "of xshare:k0=1,add=24 on this model: nothing; on another: gpt-oss-120b" in said["gpt-oss-20b"]
    assert "of oea:k0=4 on this model: nothing." in said["gpt-oss-20b"]


CHECKPOINTS = {"qwen3-30b-a3b": 61.06e9, "gpt-oss-120b": 65.25e9, "gpt-oss-20b": 13.76e9}
"""Bytes of the published checkpoints: 30.53 billion weights in bf16; OpenAI's 60.8 and 12.8 GiB."""


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_are_the_published_checkpoints(name, write, capsys):
    assert say("--model", write(COMMON | CONFIGS[name]), "--gpu", "h100", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    weights, memory = report["weights"], report["memory"]
    assert weights["total_bytes"] == pytest.approx(CHECKPOINTS[name], rel=0.005)
    assert weights["gpu_bytes"] == weights["total_bytes"]
    assert memory["left_bytes"] == pytest.approx(80 * 2**30 - weights["total_bytes"])
    assert memory["cache_tokens"] == int(memory["left_bytes"] / weights["cache_bytes_per_token"])


def test_what_does_not_fit_is_not_served(write, capsys):
    asked = ("--model", write(QWEN), "--gpu", "rtx4090", "--mem-fraction-static", 0.9)
    assert say(*asked, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["verdict"], report["served"], report["memory"]["fits"]) == ("does not fit", False, False)
    experts, others = 48 * 128 * 9437184, read_weights(write(QWEN)).held
    assert report["memory"]["resident_experts"] == int((0.9 * 24 * 2**30 - others) / (experts / 128)) == 44
    assert say(*asked) == 1
    assert "44 of 128 experts a layer would fit resident" in capsys.readouterr().out
    assert say(*asked, "--batch", 16, "--context", 8192, "--json") == 1
    out, err = capsys.readouterr()
    cached = 16 * 8192 * 48 * 2 * 4 * 128 * 2
    assert json.loads(out)["memory"]["resident_experts"] == int((0.9 * 24 * 2**30 - others - cached) / (experts / 128))
    assert err == "check: not answered: the time of a step: the weights do not fit\n"
    assert "step_ms" not in json.loads(out)["estimate"]["estimates"][0]
    assert say(*asked, "--enable-paged-experts") == 0, "they lie elsewhere"


def test_ranks_divide_the_weights(write, capsys):
    assert say("--model", write(QWEN), "--gpu", "rtx4090", "--tp", 4, "--json") == 0
    weights = json.loads(capsys.readouterr().out)["weights"]
    assert weights["gpu_bytes"] == pytest.approx(weights["total_bytes"] / 4)
    assert weights["cache_bytes_per_token"] == 48 * 2 * 128 * 2, "one of four heads"
    flags = ("--tp", 4, "--ep-size", 4, "--dp-size", 4, "--enable-dp-attention")
    assert say("--model", write(QWEN), "--gpu", "rtx4090", *flags, "--json") == 0
    weights = json.loads(capsys.readouterr().out)["weights"]
    assert weights["gpu_bytes"] == pytest.approx(weights["all_experts_bytes"] / 4 + weights["other_bytes"])


def test_a_step_that_makes_no_sense_is_not_told(write, capsys):
    """77 s of them, and more tokens than the GPU can hold."""
    asked = ("--model", write(QWEN), "--batch", 16, "--active", 48, 25)
    assert say(*asked, "--bandwidth", 0.4) == 1
    says = "--batch 16, --context 1024 at 0.4 GB/s: a step of "
    assert read_refusal(capsys).startswith(f"check: {says}")
    assert say(*asked, "--gpu", "h100", "--context", "1000000") == 1
    out, err = capsys.readouterr()
    assert "step, ms" not in out
    assert err.startswith("check: not answered: the time of a step: --batch 16 with --context 1,000,000 takes 1.57 TB")


def test_active_experts_and_bandwidth_as_given(write, capsys):
    asked = ("--model", write(QWEN), "--batch", 16, "--bandwidth", 3350, "--active", 48.8, 25.1, "--json")
    assert say(*asked) == 0
    (row,) = read_rows(capsys)
    assert row["active_experts"] == [48.8, 25.1]
    weights = read_weights(write(QWEN))
    assert row["moe_layer_us"] == [estimate_step(weights, n, 0, H100)[0] * 1e6 for n in (48.8, 25.1)]
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
    (row,) = read_rows(capsys)
    assert row["active_experts"] == [55, 25]
    assert say(*asked, "--batch", 4) == 1
    assert capsys.readouterr().err == f"check: --trace {trace}: no step of 4 rows; it has 8, 16\n"


def test_a_trace_of_observe_has_each_plans_experts_and_any_other_says_whose_they_are(write, tmp_path, capsys):
    line = {"step": 0, "phase": "decode", "layer": 0, "batch_size": 16, "experts_before": 50, "kept_mass": 1.0}
    trace = tmp_path / "trace.jsonl"
    asked = ("--model", write(QWEN), "--gpu", "h100", "--trace", trace, "--batch", 16, "--json")
    observed = {"oea:k0=3": {"experts_after": 30, "kept_mass": 0.9}}
    trace.write_text(json.dumps(line | {"experts_after": 50, "plans": observed}) + "\n")
    assert say(*asked, "--compare", "oea:k0=3") == 0
    (row,) = read_rows(capsys)
    assert (row["active_experts"], row["kept_mass"], row["source"]) == ([50, 30], 0.9, f"trace {trace}")
    assert say(*asked, "--compare", "oea:k0=2") == 1
    assert f"not among the plans that --trace {trace} observed: oea:k0=3" in capsys.readouterr().err
    trace.write_text(json.dumps(line | {"experts_after": 35}) + "\n")
    assert say(*asked, "--compare", "oea:k0=3") == 0
    (row,) = read_rows(capsys)
    assert row["source"] == f"trace {trace}, as its server kept, whatever policy is named"


RANKS = ("--tp", 8, "--ep-size", 8, "--dp-size", 8, "--enable-dp-attention")


def ask(write, capsys, *more):
    """What is told of xshare on 32 requests, as JSON."""
    asked = ("--model", write(QWEN), "--gpu", "h200", "--batch", 32, "--json")
    assert say(*asked, *more, *compare("xshare:k0=1,add=24")) == 0
    return read_rows(capsys)


def test_ranks_share_the_experts(write, capsys):
    one, eight = (ask(write, capsys, *ranks)[0] for ranks in ((), RANKS))
    assert one["fullest_rank_experts"] == one["active_experts"] == eight["active_experts"]
    assert one["active_experts"][0] / 8 < eight["fullest_rank_experts"][0] < one["active_experts"][0] / 2
    assert eight["step_ms"][0] < one["step_ms"][0]


def test_slices_of_experts_are_read_by_every_rank(write, capsys):
    """Tensor parallelism alone: each rank reads as many experts, an eighth of each, and of attention."""
    one, eight = (ask(write, capsys, *ranks)[0] for ranks in ((), ("--tp", 8)))
    assert eight["fullest_rank_experts"] == one["active_experts"]
    layer, rest = (row["moe_layer_us"][0] - 34 for row in (one, eight))
    assert rest == pytest.approx(layer / 8)


@pytest.mark.parametrize(("batch", "most"), [(8, 1), (9, 2), (16, 2)])
def test_a_step_waits_for_the_rank_with_most_whole_requests(batch, most, write, capsys):
    (row,) = ask(write, capsys, *RANKS, "--batch", batch, "--active", 10, 5)
    _, step = estimate_step(read_weights(write(QWEN)), 10, most * 1024, 4.8e12)
    assert row["step_ms"][0] == pytest.approx(step * 1e3)


def test_what_is_known_of_the_fullest_rank_is_not_the_models(write, capsys):
    (row,) = ask(write, capsys, "--active", 10, 5, *RANKS)
    assert (row["active_experts"], row["fullest_rank_experts"]) == (None, [10, 5])
    assert say("--model", write(QWEN), "--gpu", "h200", "--batch", 32, "--active", 10, 5, *RANKS) == 0
    assert "of the fullest rank" in capsys.readouterr().out


def test_the_fullest_rank_is_counted_where_the_page_says(write, capsys):
    """Its line is the decode log's, and the numbers that it takes from there are taken."""
    load = RankLoad(10, largest_before=247, largest_after=95, mean_before=214, mean_after=91)
    assert format_balance(load) in PAGE
    assert f"{PREFIX}fullest_rank_active_experts_before" in PAGE
    counted = re.search(r"here\s+`--active ([\d.]+) ([\d.]+)`", PAGE).groups()
    assert "{} -> {}".format(*counted) in format_balance(load)
    (row,) = ask(write, capsys, "--tp", 4, "--ep-size", 4, "--active", *counted)
    assert row["fullest_rank_experts"] == [24.7, 9.5]


def test_every_policy_has_its_rows(write, capsys):
    rows = ask(write, capsys, *compare("oea:k0=3"))
    assert [row["policy"] for row in rows] == ["oea:k0=3"] * 2 + ["xshare:k0=1,add=24"] * 2
    assert rows[2:] == ask(write, capsys)


def test_the_servers_own_policy_is_estimated_with_its_configuration(write, capsys):
    asked = ("--model", write(QWEN), "--gpu", "h200", "--batch", 32, "--json", *compare("oea:k0=3"))
    assert say(*asked, "--expert-policy", "xshare", "--expert-policy-config", '{"add": 24}') == 0
    rows = read_rows(capsys)
    assert [row["policy"] for row in rows] == ['xshare {"add": 24}'] * 2 + ["oea:k0=3"] * 2
    assert [row | {"policy": ""} for row in rows[:2]] == [row | {"policy": ""} for row in ask(write, capsys)]


def test_a_second_policy_is_not_dropped_without_a_word(write, capsys):
    asked = ("--model", write(QWEN), "--expert-policy", "oea:k0=3", "--expert-policy", "xshare", "--json")
    assert say(*asked) == 0
    says = "--expert-policy oea:k0=3: a server runs the last one, xshare; --compare oea:k0=3 compares it"
    assert json.loads(capsys.readouterr().out)["warnings"] == [{"by": "sglang-xshare", "says": says}]


def test_a_compared_policy_that_never_drops_an_expert_is_warned_of(write, capsys):
    """Of a number beyond 64 bits, too; and of one that is enough for this batch alone."""
    lasting, here = "xshare:k0=1,add=99999999999999999999", "xshare:k0=1,add=16"
    asked = ("--gpu", "h200", "--batch", 2, "--json", *compare(lasting, here, "oea:k0=3"))
    assert say("--model", write(QWEN), *asked) == 0
    report = json.loads(capsys.readouterr().out)
    never, enough = (warning["says"] for warning in report["warnings"])
    says = "this plan (k0 = 1, add = 99999999999999999999) never drops one of 128 experts; with add below 127 it can"
    assert never == f"{lasting}: {says}"
    assert enough.startswith(f"{here}: add = 16: 14 hold all that 2 rows want, the most it is for (--batch 2)")
    assert report["estimate"]["estimates"][0]["speedup"] == 1


def test_without_a_policy_the_models_own_routing_is_told(write, capsys):
    assert say("--model", write(QWEN), "--gpu", "h200", "--batch", 16) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " - " in line]
    assert rows[0] == "vanilla"
    assert say("--model", write(QWEN), "--gpu", "h200", "--batch", 16, "--expert-policy", "vanilla") == 0


SHARDED = ("--tp", "8", "--ep-size", "8")
BAD = {
    "--gpu h101": ("--gpu", "h101"),
    "--batch 0": ("--batch", "0"),
    "--batch 1e9": ("--batch", "1e9"),
    "--batch many": ("--batch", "many"),
    "--batch 100000000": ("--batch", "100000000"),
    f"--context 1{'0' * 400}": ("--context", "1" + "0" * 400, "--active", "8", "4"),
    "--bandwidth inf": ("--bandwidth", "inf"),
    "--bandwidth nan": ("--bandwidth", "nan"),
    "--mem-fraction-static 80%": ("--mem-fraction-static", "80%"),
    "--ep-size 24": ("--tp", "24", "--ep-size", "24"),
    "--ep-size 6": ("--tp", "8", "--ep-size", "6"),
    "--ep-size 7": ("--ep-size", "7"),
    "--dp-size 3": ("--tp", "8", "--dp-size", "3", "--enable-dp-attention"),
    "--active 9 4": (*SHARDED, "--active", "9", "4"),
    "--trace with --ep-size": (*SHARDED, "--trace", "{trace}"),
    "--active with 2 policies": (*compare("xshare", "oea:k0=3"), "--active", "40", "20"),
    "--active with --trace": ("--trace", "x", "--active", "40", "20"),
    "--compare oea:k0=9: k0 = 9": compare("oea:k0=9"),
    "--compare oea:k0=x: k0 = 'x'": compare("oea:k0=x"),
    "--compare moe-spec:budget=32: moe-spec without speculative decoding": compare("moe-spec:budget=32"),
    "--compare vanilla": compare("vanilla"),
    "--compare xshare: --batch 1": ("--batch", "1", *compare("xshare")),
    "--active 65 10": ("--active", "65", "10"),
    "--active 20 40: AFTER 40": ("--active", "20", "40"),
    "--active nan": ("--active", "nan", "4"),
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line(line, tmp_path, capsys):
    (trace := tmp_path / "trace.jsonl").write_text("")
    more = (word.replace("{trace}", str(trace)) for word in BAD[line])
    assert say("--model", TINY, "--gpu", "h100", "--batch", 16, *more) == 1
    assert read_refusal(capsys).startswith(f"check: {line}: ")


@pytest.mark.parametrize("flags", [compare("xshare"), ("--context", "5"), ("--active", "20", "10"), ("--trace", "x")])
def test_what_is_of_a_batch_asks_for_one(flags, capsys):
    assert say("--model", TINY, *flags) == 1
    assert read_refusal(capsys).startswith(f"check: {flags[0]} without --batch: ")


def test_the_shortest_step_that_is_allowed_is_estimated(capsys):
    flags = ["--batch", 2, "--context", 0, "--bandwidth", LARGEST, "--active", 1, 1, "--json"]
    assert say("--model", TINY, *flags) == 0, capsys.readouterr().err
    (row,) = read_rows(capsys)
    assert min(row["step_ms"]) > 0
    assert row["speedup"] == 1


WRONG = {
    "num_experts_per_tok 200": {"num_experts_per_tok": 200},  # of 128
    "hidden_size NaN": {"hidden_size": float("nan")},
    'num_experts "128"': {"num_experts": "128"},
    "num_experts -128": {"num_experts": -128},
    "num_experts_per_tok 8.5": {"num_experts_per_tok": 8.5},
    "num_hidden_layers 0": {"num_hidden_layers": 0},
    "num_hidden_layers -4": {"num_hidden_layers": -4},
    "moe_intermediate_size 0": {"moe_intermediate_size": 0},
    "vocab_size true": {"vocab_size": True},
    "num_key_value_heads 1e+30": {"num_key_value_heads": 1e30},
}


@pytest.mark.parametrize("key", WRONG)
def test_a_configuration_with_a_wrong_number_is_one_line(key, write, tmp_path, capsys):
    assert say("--model", write(QWEN | WRONG[key]), "--gpu", "h100") == 1
    assert read_refusal(capsys).startswith(f"check: --model {tmp_path}: config.json: {key}: ")


@pytest.mark.parametrize("key", ["moe_intermediate_size", "vocab_size"])
def test_a_key_that_is_missing_is_not_replaced_by_another(key, write, tmp_path, capsys):
    config = {name: value for name, value in QWEN.items() if name != key}
    assert say("--model", write(config), "--gpu", "h100", "--batch", 16) == 1
    out, err = capsys.readouterr()
    says = f"--model {tmp_path}: config.json: {key} is missing"
    assert err.startswith(f"check: not answered: weights and what depends on them: {says}")
    assert err.count("\n") == 1
    assert "served" not in out
    assert "weights " not in out.replace("weights and what", "")
    mixtral = config | {"architectures": ["MixtralForCausalLM"], "vocab_size": 9}
    assert read_weights(write(mixtral)).expert == 3 * 2048 * (6144 if key == "moe_intermediate_size" else 768) * 2


def test_a_model_whose_bytes_are_not_known_is_one_line(write, tmp_path, capsys):
    asked = ("--gpu", "h100", "--batch", 16)
    assert say("--model", tmp_path / "nowhere", *asked) == 1
    assert "nowhere: no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert say("--model", tmp_path, *asked) == 1
    assert f"check: --model {tmp_path}: config.json: " in capsys.readouterr().err
    dense = QWEN | {"architectures": ["Qwen3ForCausalLM"], "num_experts": None}
    assert say("--model", write(dense), *asked) == 1
    assert "Qwen3ForCausalLM is a dense model" in capsys.readouterr().err
    assert say("--model", write(QWEN | {"quantization_config": {"quant_method": "odd"}}), *asked) == 1
    assert "quant_method odd " in capsys.readouterr().err


ALONE = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "sglang", "transformers", "huggingface_hub", "yaml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from sglang_xshare.cli import main
sys.exit(main(["check", *sys.argv[1:]]))
"""


def test_without_torch_and_sglang_it_answers_what_needs_neither(write):
    asked = ["--model", str(write(QWEN)), "--gpu", "h100", "--batch", "16", "--expert-policy", "oea:k0=3", "--json"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    found = []
    for more in (["--active", "48.8", "25.1"], []):
        done = subprocess.run([sys.executable, "-c", ALONE, *asked, *more], env=env, capture_output=True, text=True)
        assert done.returncode == 1, done.stderr
        report = json.loads(done.stdout)
        assert (report["verdict"], report["weights"]["moe_layers"]) == ("not checked", 48)
        found.append((report["estimate"], done.stderr.splitlines()))
    (estimate, lines), (nothing, more_lines) = found
    assert estimate["estimates"][0]["speedup"] > 1
    assert len(lines) == 1
    assert lines[0].startswith("check: not answered: whether it would be served: ")
    assert nothing is None
    assert more_lines[:-1] == lines
    assert more_lines[-1].startswith("check: not answered: active experts: ")
