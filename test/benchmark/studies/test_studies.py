"""`python -m benchmark.studies`: its words on losses known beforehand, and all studies on a small random model.

`python -m benchmark.studies lynx moe-spec` is the same with fewer.
"""

import json

import pytest
import torch

from benchmark.quality.measure import Loss
from benchmark.studies import __main__ as command
from benchmark.studies.judging import are_even, below_curve, is_better, is_no_better, tally

BETTER, WORSE, EVEN = Loss(2.0, -0.1, 0.01), Loss(2.0, 0.1, 0.01), Loss(2.0, 0.01, 0.01)


def test_most_of_the_measurable_differences_decide():
    assert is_better([BETTER, BETTER, WORSE]) is True
    assert is_better([WORSE, WORSE, EVEN]) is False
    assert is_better([BETTER, EVEN]) is None
    assert is_better([]) is None
    assert is_no_better([EVEN, WORSE]) is True
    assert is_no_better([EVEN, BETTER]) is None
    assert is_no_better([WORSE, BETTER, BETTER]) is False
    assert is_no_better([EVEN] * 7 + [BETTER]) is True
    assert is_no_better([]) is None
    assert [are_even(some) for some in ([EVEN, EVEN], [EVEN, EVEN, BETTER], [EVEN, WORSE])] == [True, None, False]
    assert tally([BETTER, WORSE, EVEN]) == "of 3 1 better, 1 worse, 1 within error: -100.0 to +100.0 mnats"


def test_a_loss_is_compared_with_the_geometric_curve_between_two_settings():
    rungs = [(30.0, Loss(2.0, 0.01, 0.0)), (10.0, Loss(2.0, 0.16, 0.0)), (40.0, Loss(2.0, -0.01, 0.0))]
    found = below_curve((20.0, Loss(2.0, 0.03, 0.5)), rungs, 0.002)
    assert found is not None
    assert (found.delta, found.error) == (pytest.approx(0.03 - 0.04), 0.002)
    line = below_curve((35.0, Loss(2.0, 0.01, 0.5)), rungs, 0.002)
    assert line is not None
    assert line.delta == pytest.approx(0.01), "a line where a loss is not above 0"
    assert below_curve((9.0, Loss(2.0, 0.2, 0.1)), rungs, 0.002) is None


@pytest.fixture(scope="module")
def measured(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("studies")
    text = ["--model", str(checkpoint), "--per-domain", "4", "--prompt", "16", "--steps", "16"]
    arguments = [*text, "--batch", "4", "--tokens-per-request", "8", "--out", str(folder)]
    torch.manual_seed(0)
    command.main(arguments)
    return folder, arguments, json.loads((folder / "studies.json").read_text())["points"]


def test_command_measures_every_paper_into_a_record_and_draws_it(measured):
    folder, _, points = measured
    assert list(points) == list(command.STUDIES)
    for name, point in points.items():
        assert point["verdicts"]
        assert (folder / f"{name}.png").stat().st_size > 20_000


def test_an_ablation_is_over_the_same_experts(measured):
    policies = measured[2]["oea"]["numbers"]
    for policy in ("oea:k0=2,kmax=5", "oea:k0=2,max_rank=4", "pruned:k0=2"):
        # As many are active in the first layer; what it puts out differs, and so may the second's.
        assert policies[policy]["active_experts"] == pytest.approx(policies["oea:k0=2"]["active_experts"], abs=0.3)
        gap = policies[policy]["loss"]["delta"] - policies["oea:k0=2"]["loss"]["delta"]
        assert policies[policy]["over_k0"]["delta"] == pytest.approx(gap, abs=1e-5)
    assert policies["oea:k0=2,p=0.5"]["active_experts"] < policies["oea:k0=2"]["active_experts"]


def test_active_experts_of_one_row_are_its_top_k(measured):
    active = measured[2]["xshare"]["numbers"]["active"]
    assert {curve["1"] for curve in active.values()} == {4.0}
    assert active["the formula"]["2"] == pytest.approx(16 * (1 - 0.75**2))
    assert list(active["mixed domains"]) == ["1", "2", "4", "8"]
    assert list(active["one domain"]) == ["1", "2", "4"]


def test_the_oracle_errs_least_and_all_experts_not_at_all(measured):
    errors = measured[2]["moe-spec"]["numbers"]["error"]
    for ranking, curve in errors.items():
        assert curve[0] == pytest.approx(1)
        assert curve[16] == pytest.approx(0, abs=1e-6)
        assert errors["oracle"][8] <= curve[8] + 1e-6, ranking
    for curve in measured[2]["moe-spec"]["numbers"]["coverage"].values():
        assert curve["mean"][-1] == pytest.approx(1)
        assert curve["mean"] == sorted(curve["mean"])


def test_denying_is_measured_by_rank_phase_and_layer(measured):
    lynx = measured[2]["lynx"]["numbers"]
    assert list(lynx["ranks"]) == [f"choice {rank}" for rank in range(4)]
    assert list(lynx["windows"]) == ["layer 0", "layer 1"]
    assert [one["rows"] for one in lynx["confidence"].values()] == [0.75, 0.25, 0.5, 0.5, 0.25, 0.75]
    assert lynx["ranks"]["choice 0"]["delta"] != 0


def test_what_is_in_the_record_is_not_measured_again(measured, capsys):
    folder, arguments, _ = measured
    command.main([*arguments, "--resume"])
    printed = capsys.readouterr().out
    assert "The papers' claims" in printed
    assert " ...\n" not in printed
    assert str(folder) in printed


@pytest.mark.parametrize(
    ("arguments", "error", "line"),
    [
        (["lynxx"], SystemExit, "study 'lynxx':"),
        (["oea", "--steps", "30"], ValueError, "--steps 30:"),
        (["oea", "--per-domain", "400", "--batch", "400"], ValueError, "400 a domain are asked for"),
    ],
)
def test_what_it_cannot_study_is_one_line(arguments, error, line, checkpoint, tmp_path):
    with pytest.raises(error, match=line):
        command.main([*arguments, "--model", str(checkpoint), "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())
