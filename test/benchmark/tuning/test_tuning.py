"""`python -m benchmark.tuning`: what tuning saves, from a record made by hand, and from a small run."""

import pytest

from benchmark.common.record import read_record
from benchmark.tuning.__main__ import main, open_trace
from benchmark.tuning.report import find_published, tabulate_tuning


def make_point(experts: float, delta: float) -> dict:
    settings = [("xshare:k0=1,add=4", 10, 0.1), ("xshare:k0=1,add=8", 20, 0.02), ("oea:k0=2", 30, 0.01)]
    published = [
        {"policy": name, "experts": count, "loss": {"delta": loss, "error": 0.001}} for name, count, loss in settings
    ]
    tuned = {"plan": {}, "experts": experts, "kept_mass": 0.9, "loss": {"delta": delta, "error": 0.001}}
    return {"batch": 16, "tolerance": 2.0, "before": 50.0, "cross_entropy": 2.0, "published": published, **tuned}


def test_saved_experts_are_those_of_the_best_published_setting_at_the_same_loss():
    point = make_point(12.0, 0.06)
    assert find_published(point) == (pytest.approx(15.0), "xshare")
    (row,) = tabulate_tuning({"2%": point}).rows
    assert row == ["2%", "16", "50.0", "12.0", "0.900", "+60.0 ± 1.0", "+3.00%", "15.0 xshare", "20%"]


@pytest.mark.parametrize("loss", [0.2, 0.001])
def test_beyond_the_published_settings_nothing_is_claimed(loss):
    point = make_point(12.0, loss)
    assert find_published(point) is None
    assert tabulate_tuning({"2%": point}).rows[0][-2:] == ["", ""]


def test_nothing_found_is_said():
    point = make_point(12.0, 0.06)
    del point["plan"]
    assert tabulate_tuning({"2%": point}).rows[0][3] == "nothing found"


def test_former_measurements_are_used_by_who_goes_on(tmp_path):
    trace = open_trace(tmp_path / "new", resume=False)
    trace.write_text("one")
    assert open_trace(tmp_path / "new", resume=True).exists()
    assert not open_trace(tmp_path / "new", resume=False).exists()


@pytest.mark.long
def test_a_small_run(tmp_path, capsys):
    settings = ["xshare:k0=1,add=8", "xshare:k0=1,add=24"]
    sizes = ["--samples", "8", "--prompt", "8", "--tokens", "8", "--batches", "4", "--tolerances", "20"]
    main(["xshare:k0=1,add=4", "oea:k0=2", "--settings", *settings, *sizes, "--out", str(tmp_path)])
    ((name, point),) = read_record(tmp_path / "tuning.json", "tuning")["points"].items()
    assert name == "20%, 4 rows"
    assert [one["policy"] for one in point["published"]] == ["xshare:k0=1,add=4", "oea:k0=2"]
    assert 0 < point["experts"] < point["before"]
    assert "Tuned on one text, measured on another" in capsys.readouterr().out
    assert (tmp_path / "tuning.png").stat().st_size > 0
