"""`python -m benchmark.quality.front`: its changes, experts at equal loss, and all of it on a small random model."""

import json

import pytest

from benchmark.quality.equal_loss import experts_for, find_interval, format_share
from benchmark.quality.front import __main__ as command
from benchmark.quality.front.ladders import SQUARED
from benchmark.quality.front.report import tabulate_gains, tabulate_own_share
from benchmark.quality.model import Layout


def test_experts_at_a_loss_lie_on_the_line_between_two_settings():
    curve = [(10.0, 0.3), (20.0, 0.1), (30.0, 0.05)]
    assert experts_for(0.2, curve) == pytest.approx(15)
    assert experts_for(0.05, curve) == pytest.approx(30)
    assert experts_for(0.31, curve) is None
    assert experts_for(0.04, curve) is None
    assert experts_for(0.2, []) is None


def test_the_interval_of_a_share_is_over_the_batches():
    def read(means):
        return means[0] / means[1] - 1

    steady = [[0.5] * 8, [1.0] * 8]
    assert find_interval(steady, read) == (-0.5, -0.5)
    coupled = [[0.4, 0.6] * 4, [0.8, 1.2] * 4]  # of each batch the same share
    assert find_interval(coupled, read) == pytest.approx((-0.5, -0.5))
    lower, upper = find_interval([[0.4, 0.6] * 4, [1.0] * 8], read)
    assert -0.58 < lower < -0.53
    assert -0.47 < upper < -0.42
    assert find_interval([[0.5] * 4, [1.0] * 4], read) is None, "too few batches"
    assert find_interval(steady, lambda means: None) is None
    assert (format_share(-0.5, None), format_share(-0.5, (-0.6, -0.4))) == ("-50%", "-50% [-60%, -40%]")


def point(ladder, published, over, squared):
    """As the record has it, of a setting that loses `published` ± 2 thousandths, `over` ± 1 less or more if changed."""
    loss = {"cross_entropy": 1.0, "delta": published / 1000, "error": 0.002}
    names = ("published", "own_share 0.75", SQUARED)[: 3 if squared else 2]
    changes = {
        name: {
            "active_experts": 10.0 + (number == 2),
            "loss": loss,
            "over_published": {"cross_entropy": 1.0, "delta": over * number / 1000, "error": 0.001},
        }
        for number, name in enumerate(names)
    }
    return {"batch": 4, "tokens_per_request": 1, "ladder": ladder, "setting": ladder, "changes": changes}


def test_gains_are_means_over_what_loses_anything():
    first = {
        "a": point("xshare", 100, -20, True),
        "b": point("xshare", 50, -1, True),
        "c": point("xshare", 3, -3, True),  # within error of vanilla: left out
        "d": point("oea", 100, +10, False),
        "e": point("moe-spec", 1, -1, True),
    }
    rows = tabulate_gains(first, {}).rows
    assert rows[0][2:4] == ["-11% ± 2%, 1 of 2 less", "-22% ± 2%, 1 of 2 less, +10% experts"]
    assert rows[1][1:4] == ["oea", "+10% ± 1%, 0 of 1 less, 1 more", ""]
    assert rows[2][2:6] == ["-", "-", "", ""]


def test_command_measures_into_a_record_and_draws_it(checkpoint, tmp_path, capsys):
    settings = ["xshare:k0=1,add=2", "xshare:k0=1,add=4", "oea:k0=2"]
    asked = [*settings, "--batch", "4", "8", "--tokens-per-request", "1", "2"]
    text = ["--model", str(checkpoint), "--per-domain", "4", "--prompt", "16", "--steps", "8"]
    command.main([*asked, *text, "--out", str(tmp_path)])
    points = json.loads((tmp_path / "front.json").read_text())["points"]
    found = [(one["batch"], one["tokens_per_request"], one["setting"]) for one in points.values()]
    assert found == [(b, t, s) for b in (8, 4) for t in (1, 2) for s in settings]
    for one in points.values():
        assert len(one["changes"]["published"]["losses"]) == 8 // one["batch"]
        published, *changed = one["changes"].values()
        assert published["policy"] == one["setting"]
        assert published["over_published"] == {**published["over_published"], "delta": 0, "error": 0}
        for change in changed:
            gap = change["loss"]["delta"] - published["loss"]["delta"]
            assert change["over_published"]["delta"] == pytest.approx(gap, abs=1e-6)
    rows = tabulate_gains(points, models=["tiny"]).rows
    assert [row[:2] for row in rows] == [
        [str(Layout(b, t)), name] for t in (1, 2) for b in (4, 8) for name in ("xshare", "oea")
    ]
    assert tabulate_own_share(points, models=["tiny"]).rows == []
    assert ": and squared" in capsys.readouterr().out
    command.main([*asked, *text, "--out", str(tmp_path), "--resume"])
    assert "tokens, xshare" not in capsys.readouterr().out, "all of it was there"
