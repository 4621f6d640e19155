"""`python -m benchmark.quality.front`: its changes, experts at equal loss, and all of it on a small random model."""

import json

import pytest

from benchmark.common.variant import parse_plan
from benchmark.quality.front import __main__ as command
from benchmark.quality.front.ladders import LADDERS, SETTINGS, SQUARED, SWEEP, SWEPT, SWEPT_BATCH, changes_of
from benchmark.quality.front.report import experts_for, tabulate_front, tabulate_own_share


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_change_is_the_published_plan_but_for_its_keys(setting):
    published, *changed = (parse_plan(text) for text in changes_of(setting, 4).values())
    assert (published.own_share, published.utility) == (0, "full" if "moe-spec" in setting else "topk")
    for plan in changed:
        assert plan.own_share == 0.75
        for key in ("k0", "add", "budget", "coverage", "ranking", "kmax"):
            assert getattr(plan, key) == getattr(published, key)
    assert [plan.utility for plan in changed[1:]] == ([] if "oea" in setting else ["squared"])


def test_one_batch_size_has_the_sweep_too():
    assert {setting.partition(":")[0] for setting in SWEPT} == set(LADDERS)
    for setting in SWEPT:
        assert set(changes_of(setting, SWEPT_BATCH)) - set(changes_of(setting, 4)) == set(SWEEP)


def test_experts_at_a_loss_lie_on_the_line_between_two_settings():
    curve = [(10.0, 0.3), (20.0, 0.1), (30.0, 0.05)]
    assert experts_for(0.2, curve) == pytest.approx(15)
    assert experts_for(0.05, curve) == pytest.approx(30)
    assert experts_for(0.31, curve) is None
    assert experts_for(0.04, curve) is None
    assert experts_for(0.2, []) is None


def test_command_measures_into_a_record_and_draws_it(checkpoint, tmp_path, capsys):
    asked = ["xshare:k0=1,add=2", "xshare:k0=1,add=4", "oea:k0=2", "--batches", "8", "4"]
    text = ["--model", str(checkpoint), "--per-domain", "4", "--prompt", "16", "--steps", "8"]
    command.main([*asked, *text, "--out", str(tmp_path)])
    points = json.loads((tmp_path / "front.json").read_text())["points"]
    assert [(one["batch"], one["setting"]) for one in points.values()] == [(b, s) for b in (8, 4) for s in asked[:3]]
    for point in points.values():
        published, *changed = point["changes"].values()
        assert published["policy"] == point["setting"]
        assert published["over_published"] == {**published["over_published"], "delta": 0, "error": 0}
        for one in changed:
            gap = one["loss"]["delta"] - published["loss"]["delta"]
            assert one["over_published"]["delta"] == pytest.approx(gap)
    assert [row[0] for row in tabulate_front(points).rows] == ["4"] * 3 + ["8"] * 3
    assert tabulate_own_share(points).rows == []
    assert (tmp_path / "front.png").stat().st_size > 10_000
    assert SQUARED in capsys.readouterr().out
    command.main([*asked, *text, "--out", str(tmp_path), "--resume"])
    assert "batch 4, " not in capsys.readouterr().out, "all of it was there"


@pytest.mark.parametrize(
    ("arguments", "error", "line"),
    [
        (["pruned:k0=3"], SystemExit, "policy pruned:k0=3: allowed are settings of xshare, oea, moe-spec"),
        (["--batches", "3"], ValueError, "--batches 3: allowed are divisors of the 8 sequences"),
        (["xshare:k0=9"], ValueError, "k0 = 9: allowed is at most the model's top-k, 4"),
        (["xshare:own_share=0.5"], ValueError, "own_share is given twice"),
    ],
)
def test_what_it_cannot_measure_is_one_line(arguments, error, line, checkpoint, tmp_path):
    text = ["--model", str(checkpoint), "--per-domain", "4", "--prompt", "16", "--steps", "8", "--out", str(tmp_path)]
    if "--batches" not in arguments:
        text += ["--batches", "4"]
    with pytest.raises(error, match=line):
        command.main([*arguments, *text])
    assert not list(tmp_path.iterdir())
