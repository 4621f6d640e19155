"""The cost model: what ranks do, counted by hand; constants found again in times made of them; files of constants."""

import json
import re
from dataclasses import asdict, replace

import pytest

from benchmark.common.paths import ROOT
from benchmark.cost.many_devices import DEEPSEEK_V3, read_shape
from benchmark.cost.published import list_exchanges
from sglang_xshare.cli import main
from sglang_xshare.estimate.deployment import (
    Deployment,
    Load,
    Requests,
    exchange,
    exchange_all,
    held_bytes,
    layer_work,
    rest_work,
)
from sglang_xshare.estimate.latency import FAR, NEAR, estimate_step, gpu_machine
from sglang_xshare.estimate.machine import Machine, Work, fit, leave_one_out, read_machine, write_machine
from sglang_xshare.stage.evidence.balance import RankLoad, format_balance
from sglang_xshare.stage.evidence.figures import PREFIX

MACHINE = Machine(layers=3e-5, read=2e-12, near=1e-5, near_bytes=5e-12)
WORKS = [Work(layers=1 + n % 3, read=1e6 * n * n, near=n % 2, near_bytes=1e5 * (n % 5)) for n in range(1, 12)]
EXPERT = 3 * 7168 * 2048
LOAD = Load(active=100, fullest=20, slots=70)


@pytest.fixture(scope="module")
def weights():
    return read_shape(DEEPSEEK_V3)


def test_constants_are_found_again():
    times = [MACHINE.time(work) for work in WORKS]
    found = fit(WORKS, times)
    assert asdict(found) == pytest.approx(asdict(MACHINE), rel=1e-6)
    assert leave_one_out(WORKS, times) == pytest.approx([0] * len(WORKS), abs=1e-6)


def test_what_is_left_out_is_missed_by_what_the_others_say():
    works, times = [Work(layers=1)] * 3, [1.0, 1.0, 2.0]
    assert leave_one_out(works, times)[2] == pytest.approx(-0.5)


def test_no_constant_is_negative():
    works = [Work(layers=1, read=read) for read in (1, 2, 3)]
    found = fit(works, [3.0, 2.0, 1.0])  # less the more is read
    assert found.read == 0
    assert min(times / found.layers for times in (1.0, 3.0)) < 1 < max(times / found.layers for times in (1.0, 3.0))


@pytest.mark.parametrize(("works", "times"), [([], []), ([Work(1)], [0.0]), ([Work(1)], [1.0, 2.0])])
def test_no_times_to_fit_to(works, times):
    with pytest.raises(ValueError, match="allowed are as many, at least one, all above 0"):
        fit(works, times)


def test_a_file_holds_the_constants(tmp_path):
    path = tmp_path / "folder" / "machine.json"
    write_machine(MACHINE, path)
    assert read_machine(path) == MACHINE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "No such file"),
        ("[1]", "a JSON list"),
        ('{"speed": 1}', "speed"),
        ('{"read": -1}', "below 0"),
        ('{"read": 1e300}', "above 1e+06 s"),
        ('{"read": true}', "read is true, no number"),
        ('{"read": "1e-12"}', 'read is "1e-12", no number'),
        ('{"read": null}', "read is null, no number"),
        ("{", "malformed JSON"),
        ("{}", "read is missing, or 0"),
        ('{"read": 0, "layers": 0}', "read is missing, or 0"),
        ('{"read": 1, "read": 2}', "given twice"),
    ],
)
def test_a_file_that_holds_none_is_one_line(tmp_path, text, reason):
    path = tmp_path / "machine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="allowed is a JSON object of seconds") as error:
        read_machine(path)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).count("allowed") == 1


def test_a_layer_of_whole_experts_waits_for_the_fullest_rank(weights):
    work = layer_work(weights, Deployment(8, all_to_all=True), LOAD, Requests(64))
    assert work.read == 20 * EXPERT
    assert work.flops == 70 * 2 * EXPERT
    sent = 64 / 8 * 8 * 7168 * 3  # a rank's rows to their experts in fp8, and back in 16 bits
    assert (work.near, work.far, work.far_bytes) == (2, 0, 0)
    assert work.near_bytes == pytest.approx(sent * 7 / 8)


def test_slices_are_read_by_all_ranks_alike(weights):
    work = layer_work(weights, Deployment(8, placement="shard"), LOAD, Requests(64))
    assert work.read == 100 * EXPERT / 8
    assert work.flops == 64 * 8 / 8 * 2 * EXPERT
    assert work.near_bytes == pytest.approx(2 * 64 * 7168 * 2 * 7 / 8)


def test_one_rank_exchanges_nothing(weights):
    for placement in ("ep", "shard"):
        work = layer_work(weights, Deployment(placement=placement), Load(40, 40, 512), Requests(64))
        assert work == Work(layers=1, read=40 * EXPERT, flops=512 * 2 * EXPERT)


def test_bytes_that_leave_a_node():
    assert exchange(Deployment(32, 8), 2, 320.0) == Work(far=2, near_bytes=70, far_bytes=240)
    # 4 nodes: each rank sends its 1/32 to 3 others, then what it has, a node's eighth, to the 7 others; and back.
    gathered = exchange_all(Deployment(32, 8), 320.0)
    assert gathered == Work(far=2, near_bytes=2 * 40 * 7, far_bytes=2 * 10 * 3)


def test_tensor_parallel_attention_divides_weights_and_exchanges_rows(weights):
    requests = Requests(64, 1000)
    data, tensor = (rest_work(weights, Deployment(8, attention=name), requests) for name in ("data", "tensor"))
    assert data == Work(read=weights.dense + weights.cache * 64_000 / 8)
    # Latent attention caches one head, which no rank can divide.
    assert tensor.read == weights.dense / 8 + weights.cache * 64_000
    assert tensor.near == 2 * 61
    held = [held_bytes(weights, Deployment(8, attention=name)) for name in ("data", "tensor")]
    assert held[0] - held[1] == pytest.approx(weights.dense * 7 / 8)
    assert held[0] - weights.dense == 58 * 256 * EXPERT / 8


def test_a_step_is_its_layers_and_the_rest(weights):
    deployment, machine = Deployment(16, 8, all_to_all=True), gpu_machine(4.8e12, 1e15)
    requests = Requests(64, 1000)
    step = estimate_step(machine, weights, deployment, LOAD, requests)
    assert step.step == pytest.approx(58 * step.layer + step.rest)
    layers = layer_work(weights, deployment, LOAD, requests) * weights.moe_layers
    assert step.step == pytest.approx(machine.time(layers + rest_work(weights, deployment, requests)))


@pytest.mark.parametrize(("count", "most"), [(1, 1), (8, 1), (9, 2), (16, 2)])
def test_a_step_waits_for_the_rank_with_most_whole_requests(weights, count, most):
    deployment, requests = Deployment(8, all_to_all=True), Requests(count, context=1000, tokens=4)
    assert rest_work(weights, deployment, requests).read == weights.dense + most * 1000 * weights.cache
    sent = layer_work(weights, deployment, LOAD, requests).near_bytes
    assert sent == pytest.approx(most * 4 * 8 * 7168 * 3 * 7 / 8)
    # Ranks of tensor-parallel attention divide every request's heads, and the rows between them.
    tensor = replace(deployment, attention="tensor")
    assert rest_work(weights, tensor, requests).read == weights.dense / 8 + count * 1000 * weights.cache
    sent = layer_work(weights, tensor, LOAD, requests).near_bytes
    assert sent == pytest.approx(-(-count * 4 // 8) * 8 * 7168 * 3 * 7 / 8)


def test_links_are_the_fit_to_what_deepep_published():
    works, seconds = list_exchanges()
    found = fit(works, seconds)
    assert (found.near, 1 / found.near_bytes) == pytest.approx((NEAR.latency, NEAR.bandwidth), rel=0.01)
    assert (found.far, 1 / found.far_bytes) == pytest.approx((FAR.latency, FAR.bandwidth), rel=0.01)
    far = [abs(miss) for miss, work in zip(leave_one_out(works, seconds), works, strict=True) if work.far]
    assert max(far) < 0.15


def test_a_deployment_that_is_none():
    with pytest.raises(ValueError, match=r"--ranks 12: allowed is at most --node 8, or a multiple of it"):
        Deployment(12)
    with pytest.raises(ValueError, match=r"--all-to-all with --placement shard"):
        Deployment(4, placement="shard", all_to_all=True)


@pytest.fixture
def deepseek(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    return ("estimate", "--model", str(tmp_path), "--batch", "32")


def estimate(deepseek, capsys, *more):
    assert main([*deepseek, "--gpu", "h200", "--policy", "xshare:k0=1,add=24", *more, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_ranks_share_the_experts(deepseek, capsys):
    one, eight = (estimate(deepseek, capsys, "--ranks", str(ranks))["estimates"][0] for ranks in (1, 8))
    assert one["fullest_rank_experts"] == one["active_experts"] == eight["active_experts"]
    assert one["active_experts"][0] / 8 < eight["fullest_rank_experts"][0] < one["active_experts"][0] / 2
    assert eight["step_ms"][0] < one["step_ms"][0]


def test_replicas_share_the_batch_and_affinity_lets_rows_agree(deepseek, capsys):
    two = estimate(deepseek, capsys, "--replicas", "2")
    assert two["rows"] == 16
    alike = estimate(deepseek, capsys, "--replicas", "2", "--affinity-saves", "0.2")
    before, after = (report["estimates"][0]["active_experts"][0] for report in (two, alike))
    assert after / before == pytest.approx(0.8, abs=0.03)


def test_a_fitted_machine_takes_the_gpu_s_place(deepseek, capsys, tmp_path):
    path = tmp_path / "machine.json"
    write_machine(replace(MACHINE, layers=0.0), path)
    assert main([*deepseek, "--machine", str(path), "--active", "100", "50", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["estimates"][0]["moe_layer_us"] == pytest.approx([100 * EXPERT * 2e-6, 50 * EXPERT * 2e-6])
    assert main([*deepseek, "--machine", str(path), "--active", "100", "50"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "a machine as fitted" in out
    sent = "exchanges in a node x 10 us + bytes sent in it / (200 GB/s)"
    assert f"step = bytes read / (500 GB/s) + {sent}. The constants are those of --machine." in out
    assert "34 us" not in out
    assert main([*deepseek, "--machine", str(path), "--ranks", "16"]) == 1
    reason = f"--machine {path} has no exchange between nodes; allowed is at most --node 8"
    assert capsys.readouterr().err == f"estimate: --ranks 16: {reason}\n"
    assert main([*deepseek, "--machine", str(path), "--gpu", "h200"]) == 1
    assert capsys.readouterr().err == "estimate: --gpu with --machine: the file has it; allowed is one of both\n"


def test_what_is_known_of_the_fullest_rank_is_not_the_model_s(deepseek, capsys):
    known = ("--active", "20", "10", "--ranks", "8")
    (whole,) = estimate(deepseek, capsys, *known)["estimates"]
    assert (whole["active_experts"], whole["fullest_rank_experts"]) == (None, [20, 10])
    (sliced,) = estimate(deepseek, capsys, *known, "--placement", "shard")["estimates"]
    assert sliced["active_experts"] == [20, 10]
    assert main([*deepseek, "--gpu", "h200", "--policy", "xshare:k0=1,add=24", *known]) == 0
    assert capsys.readouterr().out.count("20.0 -> 10.0") == 1


def test_the_fullest_rank_is_counted_where_the_page_says(deepseek, capsys):
    """Its line is the decode log's, and the numbers that it takes from there are taken."""
    page = (ROOT / "docs" / "many-devices.md").read_text()
    load = RankLoad(10, largest_before=247, largest_after=95, mean_before=214, mean_after=91)
    assert format_balance(load) in page
    assert f"{PREFIX}fullest_rank_active_experts_before" in page
    counted = re.search(r"here\n *`--active ([\d.]+) ([\d.]+)`", page).groups()
    assert "{} -> {}".format(*counted) in format_balance(load)
    (row,) = estimate(deepseek, capsys, "--ranks", "8", "--active", *counted)["estimates"]
    assert row["fullest_rank_experts"] == [24.7, 9.5]


def test_ranks_are_told_in_the_table(deepseek, capsys):
    flags = ("--ranks", "8", "--all-to-all", "--replicas", "4", "--policy", "xshare:k0=1,target_per_rank=2")
    assert main([*deepseek, "--gpu", "h200", *flags]) == 0
    out = capsys.readouterr().out
    assert "4 x 8 ranks: whole experts, rows to their experts' ranks, data-parallel attention, " in out
    assert "of the fullest rank" in out


def test_slices_have_no_fullest_rank(deepseek, capsys):
    flags = ("--ranks", "8", "--placement", "shard")
    assert estimate(deepseek, capsys, *flags)["estimates"][0]["fullest_rank_experts"] is None
    assert main([*deepseek, "--gpu", "h200", "--policy", "xshare:k0=1,add=24", *flags]) == 0
    out = capsys.readouterr().out
    assert "a slice of each expert" in out
    assert "of the fullest rank" not in out
    assert out.count(" -> ") == 2 * 3  # active experts, layer, step


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (("--ranks", "24"), "--ranks 24: allowed is a divisor of the 256 experts of the model"),
        (("--ranks", "7", "--placement", "shard"), "--ranks 7: allowed is a divisor of the 2048 columns of an expert"),
        (("--ranks", "8", "--active", "40", "20"), "--active 40: allowed is 1 to a rank's 32 experts"),
        (
            ("--ranks", "8", "--trace", "x"),
            "--trace with --ranks: it tells no rank's experts; allowed is --active, the",
        ),
        (("--replicas", "0"), "--replicas 0: allowed is 1 to 1,000,000,000"),
        (("--near", "5", "0"), "--near 5 0: allowed are 0 to 1,000,000,000 us, and 0.001 to 1,000,000,000 GB/s"),
        (("--affinity-saves", "1"), "--affinity-saves 1: allowed is 0 or more, and less than 1"),
        (
            ("--affinity-saves", "0.1", "--active", "40", "20"),
            "--affinity-saves with --active: its experts are as counted; allowed is one of both",
        ),
        (("--affinity-saves", "0.99"), "--affinity-saves 0.99: rows that all agree save less; allowed is a smaller"),
    ],
)
def test_bad_input_is_one_line(deepseek, capsys, more, line):
    assert main([*deepseek, "--gpu", "h200", *more]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"estimate: {line}")
    assert error.count("\n") == 1
