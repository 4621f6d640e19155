"""The command that measures paged experts offline: small and for real, its table, and what it says of bad input."""

import pytest

from benchmark.common.paths import TRAINED
from benchmark.common.record import read_record
from benchmark.paged import __main__ as command
from benchmark.paged.report import BY_LAYER, UNIFORM, judge, tabulate_paged
from benchmark.quality.model import load_model

SIZES = ["--per-domain", "4", "--prompt", "16", "--steps", "8", "--batches", "2"]


def test_page_ins_and_loss_for_real_and_nothing_more_when_it_is_resumed(tmp_path, monkeypatch, capsys):
    arguments = [UNIFORM[0], BY_LAYER[0], *SIZES, "--batch", "2", "8", "--slots", "16", "64", "--out", str(tmp_path)]
    command.main(arguments)
    points = list(read_record(tmp_path / "paged.json", "paged")["points"].values())
    assert len(points) == 2 * 2 * 3
    found = {(one["rows"], one["slots"], one["policy"]): one for one in points}
    for rows in (2, 8):
        vanilla, policy = (found[rows, 16, name] for name in ("vanilla", UNIFORM[0]))
        assert vanilla["page_ins"] == vanilla["page_ins_before"] > policy["page_ins"] > 0
        assert policy["page_ins_before"] > policy["page_ins"]
        assert policy["active_experts"] <= 16
        assert vanilla["loss"]["delta"] == 0
        whole = found[rows, 64, UNIFORM[0]]
        assert whole["page_ins"] == 0
        assert whole["kept_mass"] == pytest.approx(1)
        assert whole["loss"]["delta"] == pytest.approx(0, abs=1e-5)
    assert "Record: " in capsys.readouterr().out
    monkeypatch.setattr(command, "measure", lambda *_: pytest.fail("measured again"))
    command.main([*arguments, "--resume"])


def test_layers_have_plans_of_their_own():
    model = load_model(TRAINED)
    assert [plan.add for plan in command.list_plans(model, BY_LAYER[0], 16)] == [2, 2, 4, 8]
    assert {plan.policy for plan in command.list_plans(model, "vanilla", 1)} == {"vanilla"}
    assert command.list_plans(model, UNIFORM[0], 1)[0].add == 4  # one row can gain here


def point(policy, page_ins, delta, rows=16, slots=32):
    loss = {"cross_entropy": 2.0, "delta": delta / 1000, "error": 0.001}
    return {"policy": policy, "page_ins": page_ins, "loss": loss, "rows": rows, "slots": slots}


def test_the_bar_is_judged_by_the_least_loss_within_it():
    points = dict(enumerate([point("vanilla", 20, 0), point(UNIFORM[0], 5, 4), point(UNIFORM[1], 7, 1)]))
    assert judge(points, 0.30, 0.005).endswith(
        "at most 0.30 of vanilla's at +0.005 nats; xshare:k0=1,add=4: 0.25 at +0.0040 ± 0.0010."
    )
    assert judge(points, 0.10, 5) == ""
    table = tabulate_paged(points | {"8": point("vanilla", 10, 0, rows=8)})
    assert table.rows[1] == ["32", "xshare:k0=1,add=4", "", "5.0 (0.25) at +0.0040 ± 0.0010"]
