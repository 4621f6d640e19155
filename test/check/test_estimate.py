"""What `sglang-xshare check` estimates: active experts, kept mass and the time of a step."""

import re

import pytest

from benchmark.common.paths import RESULTS, ROOT
from benchmark.common.record import read_record
from benchmark.gpu import moe_layer
from benchmark.gpu.server import point_key
from benchmark.records.tables import H200_RUN
from check.asking import H100, QWEN, compare, compare_step, say
from sglang_xshare.check.active import draw_loads
from sglang_xshare.check.estimate import COMMON as ASSUMED
from sglang_xshare.check.estimate import Step, estimate_step
from sglang_xshare.check.server import read_flags
from sglang_xshare.check.weights import read_weights
from sglang_xshare.compatibility.moe_model import MoeModel
from sglang_xshare.policies.schedule import build_schedule
from sglang_xshare.stage.record.figures import PREFIX
from sglang_xshare.stage.record.interval import Interval, format_log

pytestmark = pytest.mark.usefixtures("served")

PAGE = (ROOT / "docs" / "check.md").read_text()
OEA = {"vanilla": (48.8, 175.7), "oea:k0=5": (35.1, 136.0), "oea:k0=3": (25.1, 106.8)}
"""OEA, Tables 3 and 4: active experts, and us of one MoE layer of Qwen3-30B-A3B in bf16 on an H100, 16 rows."""


def test_a_step_is_its_layers_and_the_rest(write):
    weights = read_weights(write(QWEN))
    layer, step = estimate_step(weights, 40, 16 * 1024, H100)
    assert layer == pytest.approx(34e-6 + 40 * 9437184 / (0.97 * H100))
    assert step == pytest.approx(48 * (layer + 40e-6) + (weights.dense + 16 * 1024 * weights.cache) / (0.97 * H100))


def test_the_page_states_how_far_the_layer_is_from_oea_s_table(write):
    """OEA's own points, from which the constants are: that they are near shows the line, and no more."""
    for policy, (active, measured) in OEA.items():
        estimated = estimate_step(read_weights(write(QWEN)), active, 0, H100)[0] * 1e6
        row = f"| {policy} | {active} | {measured} | {estimated:.1f} | {estimated / measured - 1:+.1%} |"
        assert row in PAGE, row
        assert abs(estimated / measured - 1) < 0.01


H200 = 4.8e12
H100_RUN = "2026-11-26-nvidia-h100-80gb-hbm3"
RUNS = {"H100": (H100_RUN, H100, 0.16), "H200": (H200_RUN, H200, 0.16)}
"""The folder of a GPU's records, its bandwidth, and how far a step of Qwen3-30B-A3B is off there."""
NAMES = {"gpt-oss-120b": "gpt-oss-120b-no-warm-up"}


@pytest.mark.parametrize(
    ("gpu", "name", "requests"),
    [
        *(("H100", "qwen3-30b-a3b", requests) for requests in (1, 4, 8, 16, 32)),
        ("H100", "gpt-oss-20b", 16),
        *(("H200", "qwen3-30b-a3b", requests) for requests in (4, 8, 16, 32)),
        ("H200", "gpt-oss-120b", 16),
    ],
)
def test_the_page_states_how_far_a_step_is_from_a_servers(gpu, name, requests, write):
    run, bandwidth, off = RUNS[gpu]
    points = read_record(RESULTS / run / "server.json")["points"]
    point = points[point_key(NAMES.get(name, name), requests)]
    _, active, estimated, measured = compare_step(point, requests, bandwidth, write)
    told = [
        f"{one[0]:.{digits}f} -> {one[1]:.{digits}f}" for one, digits in ((active, 1), (measured, 2), (estimated, 2))
    ]
    ratios = [f"{one[0] / one[1]:.2f}" for one in (measured, estimated)]
    row = f"| {gpu}, {name}, {requests} | {' | '.join([*told, *ratios])} |"
    assert row in PAGE, row
    far = max(abs(mine / theirs - 1) for mine, theirs in zip(estimated, measured, strict=True))
    assert (far < off) == (name == "qwen3-30b-a3b")


def test_drawn_rows_are_as_active_as_oea_counted(write):
    assert ASSUMED == moe_layer.COMMON
    model = read_weights(write(QWEN)).model
    for text, k0 in (("oea:k0=3", 3), ("oea:k0=5", 5)):
        drawn = draw_loads(build_schedule("oea", {"k0": k0}, False), model, 16, 1, ASSUMED)
        assert drawn["active_experts"] == pytest.approx([OEA["vanilla"][0], OEA[text][0]], abs=1.5)
        assert drawn["kept_mass"] < 1, "of the policy"


SMALL = MoeModel("model", "Qwen3MoeForCausalLM", 1, 32, 4, "softmax", renormalize=True)


def test_drawn_layers_have_the_plans_of_the_models_layers():
    schedule = build_schedule("oea", {"k0": 2, "layers": {"0": {"policy": "vanilla"}}}, False)
    before, after = draw_loads(schedule, SMALL, 16, 1, ASSUMED)["active_experts"]
    assert before == after
    by_request = build_schedule("xshare", {"k0": 0, "add_per_request": 1}, True)
    assert draw_loads(by_request, SMALL, 16, 16, ASSUMED)["active_experts"][1] == 1, "of one request of 16 rows"


def test_a_step_in_which_the_policy_does_not_act_is_drawn_without_it():
    for policy, keys, rows, tokens, acts in (
        ("moe-spec", {"budget": 8}, 16, 4, True),
        ("moe-spec", {"budget": 8}, 16, 1, False),  # a decode step
        ("xshare", {"k0": 0, "add": 2}, 2, 1, True),
        ("xshare", {"k0": 0, "add": 2}, 1, 1, False),  # below min_rows
    ):
        before, after = draw_loads(build_schedule(policy, keys, True), SMALL, rows, tokens, ASSUMED)["active_experts"]
        assert (policy, rows, tokens, after < before) == (policy, rows, tokens, acts)


def test_a_plan_that_the_model_cannot_have_is_refused(write):
    step = Step(read_weights(write(QWEN | {"norm_topk_prob": False})), read_flags(["--model", "x"]), 16, 1024)
    with pytest.raises(ValueError, match=r"own_share = 0\.75: must be used with a model that renormalizes"):
        step.read_policy("--compare", "xshare:k0=1,add=8,own_share=0.75", {})


def test_a_policy_has_a_row_with_the_range_of_what_is_assumed(write, tell, capsys):
    asked = ("--model", write(QWEN), "--gpu", "h200", "--batch", 16, *compare("xshare:k0=1,add=24", "oea:k0=3"))
    assert say(*asked) == 0
    out = capsys.readouterr().out
    assert "ESTIMATE, not a measurement" in out
    estimated = tell(*asked)["estimate"]
    assert estimated["bandwidth_gb_per_s"] == 4800
    rows = estimated["estimates"]
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


def test_active_experts_and_bandwidth_as_given(write, estimate):
    (row,) = estimate("--batch", 16, "--bandwidth", 3350, "--active", 48.8, 25.1)
    assert row["active_experts"] == [48.8, 25.1]
    weights = read_weights(write(QWEN))
    assert row["moe_layer_us"] == [estimate_step(weights, n, 0, H100)[0] * 1e6 for n in (48.8, 25.1)]
    assert row["speedup"] == pytest.approx(row["step_ms"][0] / row["step_ms"][1])
    assert row["speedup"] > 1


H200_STEP = ("--gpu", "h200", "--batch", 32)
XSHARE = compare("xshare:k0=1,add=24")


def test_the_servers_own_policy_is_estimated_with_its_configuration(estimate):
    own = ("--expert-policy", "xshare", "--expert-policy-config", '{"add": 24}')
    rows = estimate(*H200_STEP, *compare("oea:k0=3"), *own)
    assert [row["policy"] for row in rows] == ['xshare {"add": 24}'] * 2 + ["oea:k0=3"] * 2
    assert rows[:2] == [row | {"policy": 'xshare {"add": 24}'} for row in estimate(*H200_STEP, *XSHARE)]


def test_bare_xshare_is_estimated_where_nobody_names_a_policy(write, estimate, capsys):
    """Which says what it is; not for a request alone, which it leaves to the model."""
    assert say("--model", write(QWEN), *H200_STEP) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "xshare: k0=1, mass=default (0.85 up to 7 rows, 0.9 up to 15, 0.93 from 16 on)." in told
    assert {row["policy"] for row in estimate(*H200_STEP, "--batch", 1)} == {"vanilla"}


def test_the_start_command_names_a_model_that_a_file_names(write, tmp_path, capsys):
    """`sglang serve` does not look there."""
    model, file = write(QWEN), tmp_path / "server.yaml"
    file.write_text(f"model-path: {model}\n")
    for flags, named in (("--config", file), f" --model-path {model}"), (("--model-path", model), ""):
        assert say(*flags, "--gpu", "h200") == 0
        spelt = " ".join(map(str, flags))
        assert f"Start it: sglang serve {spelt} --gpu h200" not in (out := capsys.readouterr().out)
        assert f"Start it: sglang serve {spelt} --expert-policy xshare{named}\n" in out


def test_without_a_policy_the_models_own_routing_is_told(write, capsys):
    assert say("--model", write(QWEN), "--gpu", "h200", "--batch", 16) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " - " in line]
    assert rows[0] == "vanilla"
    assert say("--model", write(QWEN), "--gpu", "h200", "--mask-padding-experts") == 0
    assert "--expert-policy" not in capsys.readouterr().out
    assert say("--model", write(QWEN), "--gpu", "h200", "--batch", 16, "--expert-policy", "vanilla") == 0


RANKS = ("--tp", 8, "--ep-size", 8, "--dp-size", 8, "--enable-dp-attention")


def test_ranks_share_the_experts(estimate):
    one, eight = (estimate(*H200_STEP, *XSHARE, *ranks)[0] for ranks in ((), RANKS))
    assert one["fullest_rank_experts"] == one["active_experts"] == eight["active_experts"]
    assert one["active_experts"][0] / 8 < eight["fullest_rank_experts"][0] < one["active_experts"][0] / 2
    assert eight["step_ms"][0] < one["step_ms"][0]


def test_slices_of_experts_are_read_by_every_rank(estimate):
    """Tensor parallelism alone: each rank reads as many experts, an eighth of each, and of attention."""
    one, eight = (estimate(*H200_STEP, *XSHARE, *ranks)[0] for ranks in ((), ("--tp", 8)))
    assert eight["fullest_rank_experts"] == one["active_experts"]
    layer, rest = (row["moe_layer_us"][0] - 34 for row in (one, eight))
    assert rest == pytest.approx(layer / 8)


@pytest.mark.parametrize(("batch", "most"), [(8, 1), (9, 2), (16, 2)])
def test_a_step_waits_for_the_rank_with_most_whole_requests(batch, most, write, estimate):
    (row,) = estimate("--gpu", "h200", *RANKS, "--batch", batch, "--active", 10, 5)
    _, step = estimate_step(read_weights(write(QWEN)), 10, most * 1024, H200)
    assert row["step_ms"][0] == pytest.approx(step * 1e3)


def test_what_is_known_of_the_fullest_rank_is_not_the_models(write, estimate, capsys):
    asked = (*H200_STEP, *RANKS, "--active", 10, 5)
    (row,) = estimate(*asked)
    assert (row["active_experts"], row["fullest_rank_experts"]) == (None, [10, 5])
    assert say("--model", write(QWEN), *asked) == 0
    assert "of the fullest rank" in capsys.readouterr().out


def test_the_fullest_rank_is_counted_where_the_page_says(estimate):
    """Its line is the decode log's, and the numbers that it takes from there are taken."""
    interval = Interval(10, 800, 310, 9.0, 10, 0, {}, fullest_before=247, fullest_after=95)
    line = format_log(interval).rpartition(", ")[2]
    assert f", {line}\n" in PAGE
    assert f"{PREFIX}fullest_rank_experts_before_total" in PAGE
    counted = re.search(r"means\s+`--active ([\d.]+) ([\d.]+)`", PAGE).groups()
    assert "{} -> {}".format(*counted) in line
    (row,) = estimate(*H200_STEP, "--tp", 4, "--ep-size", 4, "--active", *counted)
    assert row["fullest_rank_experts"] == [24.7, 9.5]
