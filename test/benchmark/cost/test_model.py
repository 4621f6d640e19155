"""The cost model's measurement and its paper: work counted by hand, and small runs of both commands."""

import json

import pytest
import torch

from benchmark.common.command import one_line_errors
from benchmark.common.paths import RESULTS
from benchmark.cost.fit import Fitted, fit_served, tabulate_fits
from benchmark.cost.many_devices import list_choices, read_savings
from benchmark.cost.many_devices import main as run_paper
from benchmark.cost.model import AwakeRouter, count_work
from benchmark.cost.model import main as run_model
from benchmark.expert_sharding.ranks import Encoder
from benchmark.records.tables import _read
from sglang_xshare.affinity.bound import DEFAULT
from sglang_xshare.estimate.machine import Machine, Work

MACHINE = Machine(layers=1e-4, read=1e-10, flops=1e-11, near=1e-4)


def make_encoder(ranks: int, awake: int, spread: bool, rows: int = 32) -> Encoder:
    return Encoder(AwakeRouter(16, awake, spread, 2, ranks * 2), rows, 1, 2, hidden=16, width=32)


def test_rows_draw_awake_experts_alone_and_all_rounds_are_alike():
    for spread in (True, False):
        router = AwakeRouter(16, 4, spread, 2, period=6)
        ids, weights = router.route(200, seed=1)
        assert set(ids.flatten().tolist()) == ({0, 4, 8, 12} if spread else {0, 1, 2, 3})
        assert all(len(set(row)) == 2 for row in ids.tolist())
        assert weights.sum(1).allclose(torch.ones(200))
        assert router.route(200, seed=7)[0].equal(ids)
        assert not router.route(200, seed=2)[0].equal(ids)


def test_work_is_what_a_count_by_hand_gives():
    encoder, ranks = make_encoder(2, 8, spread=False), 2
    expert, total = 3 * 16 * 32, {"shard": [], "ep": []}
    for layer in range(2):
        ids = torch.cat([encoder.route(16, rank)[layer][0].flatten() for rank in range(ranks)]).tolist()
        assert max(ids) < 8  # all on the first of two ranks
        total["ep"].append((len(set(ids)) * expert * 4, len(ids) * 2 * expert))
        total["shard"].append((len(set(ids)) * expert * 4 / 2, len(ids) * 2 * expert / 2))
    for layout, by_layer in total.items():
        work = count_work(encoder, layout, ranks)
        assert (work.layers, work.near) == (1, 4)
        assert (work.read, work.flops) == tuple(sum(values) / 2 for values in zip(*by_layer, strict=True))
    assert count_work(encoder, "ep, all-to-all", ranks).near_bytes == 2 * (64 / 2) * 16 * 4 / 2
    assert count_work(make_encoder(1, 8, spread=True), "ep", 1).near == 0


def test_the_table_has_what_a_fit_misses():
    works = [Work(layers=1, read=1e6 * number) for number in range(1, 6)]
    cells = Fitted(works, [MACHINE.time(work) for work in works]).to_cells()
    assert cells == ["5", "0%", "0%", "100 us", "10 GB/s", "-", "- | -", "- | -"]


def test_served_steps_are_fitted_from_their_record():
    serving = _read(RESULTS, "serving")["points"]
    fitted = fit_served(serving)
    assert len(fitted.seconds) == 5
    assert 0 < max(abs(miss) for miss in fitted.misses) < 0.5
    layouts = {
        str(read): {"seconds": MACHINE.time(Work(1, read)), "work": {"layers": 1, "read": read}} for read in (5, 9)
    }
    layers = {"a": {"layouts": layouts}}
    assert [row[0] for row in tabulate_fits(layers, serving).rows] == [
        "layers on ranks, CPU",
        "served decode steps, CPU",
        "DeepEP's exchanges, H800",
    ]


def test_a_small_run(tmp_path, capsys):
    small = ["--experts", "8", "--awake", "4", "8", "--hidden", "16", "--width", "32", "--rows", "8", "--rounds", "1"]
    run_model([*small, "--top-k", "2", "--out", str(tmp_path)])
    points = json.loads((tmp_path / "model.json").read_text())["points"]
    assert list(points) == [
        "1 ranks, 8 rows, 4 experts",
        "1 ranks, 8 rows, 8 experts",
        "2 ranks, 8 rows, 4 experts, spread",
        "2 ranks, 8 rows, 4 experts, on the first ranks",
        "2 ranks, 8 rows, 8 experts, spread",
    ]
    constants = json.loads((tmp_path / "machine.json").read_text())
    assert constants["layers"] >= 0
    assert "missed" in capsys.readouterr().out


def test_a_deployment_s_choices_differ_by_what_they_say():
    names = [choice.name for choice in list_choices(32)]
    assert names[0] == "4 x EP 8"
    assert "4 x slices 8, affinity, selection" in names
    assert names[-2:] == ["1 x EP 32", "1 x EP 32, selection"]
    assert list_choices(64, 2)[-1].name == "1 x EP 64, across the sites"
    assert all(choice.replicas * choice.deployment.ranks == 64 for choice in list_choices(64, 2))


def test_a_deployment_on_paper(tmp_path, capsys):
    run_paper(["--gpus", "16x2", "--per-gpu", "2", "--affinity-saves", "0.1", "--out", str(tmp_path)])
    points = json.loads((tmp_path / "many-devices.json").read_text())["points"]
    by_name = {point["choice"]["name"]: point for point in points.values()}
    plain, selection, affinity = (by_name[f"2 x EP 8{more}"] for more in ("", ", selection", ", affinity"))
    assert plain["rows"] == 16
    assert plain["kept_mass"] == affinity["kept_mass"] == 1
    assert affinity["load"]["active"] / plain["load"]["active"] == pytest.approx(0.9, abs=0.03)
    assert 0.98 <= selection["kept_mass"] < 1
    assert selection["load"]["fullest"] < plain["load"]["fullest"]
    across = by_name["1 x EP 16, across the sites"]["seconds"]["step"]
    assert across > 58 * 2 * 10e-3 > 10 * plain["seconds"]["step"]
    assert "on paper" in capsys.readouterr().out


def test_affinity_saves_what_is_recorded_of_as_many_replicas(tmp_path, capsys):
    recorded = json.loads((RESULTS / "affinity" / "affinity.json").read_text())["points"]
    active = {count: recorded[f"mixed {count}"]["rules"] for count in (2, 4, 8)}
    savings = read_savings([2, 4, 8])
    for count, rules in active.items():
        ratio = rules[f"bound {DEFAULT:g}"]["active"] / rules["round robin"]["active"]
        assert savings[count] == pytest.approx(1 - ratio, abs=1e-4)
    assert savings[2] < savings[4] < savings[8]
    run_paper(["--gpus", "16", "32", "--per-gpu", "1", "--out", str(tmp_path)])
    points = json.loads((tmp_path / "many-devices.json").read_text())["points"].values()
    assert {point["choice"]["replicas"] for point in points if point["choice"]["affinity"]} == {2, 4}
    for point in points:
        assert point["saves"] == (savings[point["choice"]["replicas"]] if point["choice"]["affinity"] else 0)
    out = " ".join(capsys.readouterr().out.split())
    assert f"{savings[2]:.1%} fewer among 2 replicas, {savings[4]:.1%} fewer among 4 replicas. " in out


@pytest.mark.parametrize(
    ("run", "flags", "said"),
    [
        (run_model, ["--awake", "3"], "--awake 3: allowed is 4, the experts of a row, to 128, all"),
        (run_paper, ["--gpus", "12"], "12: allowed are nodes of 8 GPUs, as many on each site"),
        (run_paper, ["--gpus", "32", "48"], "48: allowed is a divisor of 256 experts"),
        (run_paper, ["--gpus", "80"], "80: allowed is a divisor of 256 experts"),
        (run_paper, ["--gpus", "512x2"], "512x2: allowed is a divisor of 256 experts"),
        (run_paper, ["--gpus", "128x16"], "--gpus: affinity among 16 replicas is not recorded"),
        (
            run_paper,
            ["--per-gpu", "1000000"],
            "--per-gpu 1000000: a step of 256,000,000 rows; allowed are at most 16,384",
        ),
        (run_paper, ["--affinity-saves", "nan"], "'nan': allowed is a share from 0 to 1"),
        (run_paper, ["--common", "1.5"], "'1.5': allowed is a share from 0 to 1"),
        (run_paper, ["--common", "nan"], "'nan': allowed is a share from 0 to 1"),
        (run_paper, ["--affinity-saves", "0.1", "--keeps", "1.5"], "--keeps 1.5: all experts keep less"),
    ],
)
def test_bad_input_is_one_line(run, flags, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit, one_line_errors("cost"):
        run([*flags, "--out", str(tmp_path)])
    assert said in str(exit.value)
    assert "\n" not in str(exit.value)
