"""`python -m benchmark.quality.stand_ins`: the approximations, a decode with them beside plans that say the same, what
is saved at equal loss.
"""

import json

import pytest
import torch

from benchmark.common.variant import BASELINE, parse_plan
from benchmark.quality.model import Layout, prefill
from benchmark.quality.routing import find_gates
from benchmark.quality.stand_ins import __main__ as command
from benchmark.quality.stand_ins.decode import decode, observe, read_weights
from benchmark.quality.stand_ins.factors import (
    Moments,
    StandIns,
    Weights,
    low_rank,
    root_moment,
    shared_basis,
    truncate,
)
from benchmark.quality.stand_ins.report import ALONE, save, tabulate_stand_ins

LAYOUT = Layout(4)


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture
def weights():
    return Weights(draw(6, 8, 10), draw(6, 10, 4))


def lopsided(rows, width):
    """Inputs that are ten times as large in one half of their directions."""
    return draw(rows, width) * torch.linspace(0.1, 3, width) @ draw(width, width)


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_a_truncation_leaves_the_discarded_singular_values(rank):
    matrices = draw(5, 8, 12)
    short = truncate(matrices, rank)
    discarded = torch.linalg.svdvals(matrices)[:, rank:].square().sum(1)
    torch.testing.assert_close((matrices - short).square().sum((1, 2)), discarded)
    assert (torch.linalg.matrix_rank(short) == rank).all()


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_by_inputs_the_outputs_are_nearest(rank):
    matrix, inputs = draw(8, 12), lopsided(300, 12)
    short = truncate(matrix, rank, root_moment(inputs))
    assert torch.linalg.matrix_rank(short) == rank
    # The nearest outputs of a rank, whatever gives them: those of the outputs' own singular vectors.
    outputs = inputs @ matrix.T
    values = torch.linalg.svdvals(outputs)
    error = (outputs - inputs @ short.T).square().sum()
    assert error < 1.05 * values[rank:].square().sum()  # as near as the ridge allows
    assert error < (outputs - inputs @ truncate(matrix, rank).T).square().sum()


@pytest.mark.parametrize("make", [low_rank, shared_basis])
def test_a_stand_in_of_full_size_is_the_expert(make, weights):
    whole = make(weights, 10.0)
    roots = Moments(root_moment(lopsided(90, 10)), root_moment(lopsided(90, 4)))
    by_inputs = make(weights, 10.0, roots)
    for found in (whole, by_inputs):
        torch.testing.assert_close(found.weights.gate_up, weights.gate_up, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found.weights.down, weights.down, rtol=1e-3, atol=1e-4)


def test_sizes_are_those_of_the_factors(weights):
    assert weights.size == 8 * 10 + 10 * 4
    found = low_rank(weights, 0.3)  # of 120 numbers, where a rank takes 18 + 14
    assert found.own == pytest.approx(32 / 120)
    assert (torch.linalg.matrix_rank(found.weights.gate_up) == 1).all()
    found = shared_basis(weights, 0.3)  # cores of 4 x 4 and of 4 x 4, and bases of 8, 10 and 10 x 4
    assert found.own == pytest.approx(32 / 120)
    assert found.common == pytest.approx((8 + 10 + 10) * 4 / 120)


def test_common_bases_hold_what_all_experts_have_in_common():
    left, right = draw(8, 3), draw(3, 10)
    alike = Weights(left @ draw(6, 3, 3) @ right, draw(6, 10, 4))
    found = shared_basis(alike, 0.3)  # a rank of 4
    torch.testing.assert_close(found.weights.gate_up, alike.gate_up, rtol=1e-3, atol=1e-4)


def test_moments_are_of_the_inputs_that_an_expert_gets(model):
    tokens = torch.randint(300, (3, 20), generator=torch.Generator().manual_seed(2))
    experts = find_gates(model)[1].block.experts
    seen = []
    handle = experts.register_forward_pre_hook(lambda module, args: seen.append(args))
    with torch.no_grad():
        model(tokens)
    handle.remove()
    hidden, ids, _ = seen[0]
    each, _ = observe(model, tokens)[1]
    for expert in range(experts.num_experts):
        rows = [row for row, own in zip(hidden, ids, strict=True) if expert in own]
        if len(rows) < 2:
            continue
        inner = []
        for row in rows:
            gate, up = (experts.gate_up_proj[expert] @ row).chunk(2)
            inner.append(torch.nn.functional.silu(gate) * up)
        for root, inputs in ((each.hidden[expert], rows), (each.inner[expert], inner)):
            moment = sum(torch.outer(one, one) for one in inputs) / len(inputs)
            ridge = 0.01 * moment.diagonal().mean() * torch.eye(len(moment))
            torch.testing.assert_close(root @ root.T, moment + ridge, rtol=1e-3, atol=1e-4)


@pytest.fixture
def prefilled(model):
    return prefill(model, torch.randint(300, (8, 5), generator=torch.Generator().manual_seed(3)))


@pytest.fixture
def tokens():
    return torch.randint(300, (8, 6), generator=torch.Generator().manual_seed(4))


def test_exact_stand_ins_change_nothing_and_all_that_is_chosen_is_counted(model, prefilled, tokens):
    exact = [StandIns(weights, 0.25, 2.0) for weights in read_weights(model)]
    plan = parse_plan("xshare:k0=1,add=2")
    logits, loads = decode(prefilled, tokens, plan, LAYOUT, exact)
    vanilla, routing = prefilled.decode(tokens, parse_plan(BASELINE), LAYOUT)
    torch.testing.assert_close(logits, vanilla, rtol=1e-4, atol=1e-5)
    for awake, used, worth, active in zip(loads.awake, loads.used, loads.worth, routing.active, strict=True):
        assert used.min() > 0
        assert torch.equal(awake + used, active)
        torch.testing.assert_close(worth, awake + 0.25 * used + 2)
    assert torch.equal(prefilled.decode(tokens, parse_plan(BASELINE), LAYOUT)[0], vanilla), "the model is as it was"


def test_stand_ins_of_nothing_are_a_truncation(model, prefilled, tokens):
    nothing = [
        StandIns(Weights(*(torch.zeros_like(one) for one in weights.pair)), 0.0) for weights in read_weights(model)
    ]
    logits, loads = decode(prefilled, tokens, parse_plan("xshare:k0=1,add=2"), LAYOUT, nothing)
    expected, routing = prefilled.decode(tokens, parse_plan("custom:k0=1,add=2,coverage=truncate"), LAYOUT)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, loads.awake, routing.active))


def point(kind, awake, loss, worth=None):
    """Two sequences, the second of which loses 2 mnats more than the first."""
    deltas = [loss - 0.001, loss + 0.001]
    sizes = {} if worth is None else {"own": 0.125, "common": 0.0, "used": 10.0}
    return {"kind": kind, "awake": awake, "worth": worth or awake, "used": 0.0, "deltas": deltas} | sizes


def test_what_is_saved_is_told_on_the_line_of_the_plan_alone():
    points = {
        "a": point(ALONE[0], 10.0, 0.3),
        "b": point(ALONE[0], 20.0, 0.1),
        "c": point("low rank", 12.0, 0.2, 13.5),
        "d": point("low rank", 12.0, 0.05, 13.5),
        "e": point("low rank", 12.0, 0.4, 13.5),
    }
    experts, loaded = save(points["c"], points, ALONE[0])  # the plan alone takes 15
    assert (experts.share, loaded.share) == (pytest.approx(0.2), pytest.approx(0.1))
    assert experts.error == pytest.approx(0, abs=1e-9), "all sequences differ by the same"
    assert save(points["d"], points, ALONE[0]) is None
    assert save(points["e"], points, ALONE[0]) is None
    assert save(points["c"], points, ALONE[1]) is None
    points["c"]["deltas"] = [0.195, 0.205]  # 4 mnats more apart than the line: 0.2 experts to either side
    _, loaded = save(points["c"], points, ALONE[0])
    assert loaded.error == pytest.approx(0.5 * (13.5 / 14.8 - 13.5 / 15.2), rel=1e-3)


def test_command_measures_into_a_record_and_draws_it(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "SHARES", (0.5,))
    asked = ["--model", str(checkpoint), "--inputs", str(checkpoint / "heldout"), "--observed", "4"]
    asked += ["--per-domain", "4", "--prompt", "16", "--steps", "8", "--batch", "4", "--out", str(tmp_path)]
    command.main(asked)
    points = json.loads((tmp_path / "stand_ins.json").read_text())["points"]
    assert {one["kind"] for one in points.values()} == {*ALONE, *(f"{kind}, 1/2" for kind in command.KINDS)}
    for one in points.values():
        assert len(one["deltas"]) == 8
        if one["kind"] not in ALONE:
            assert one["worth"] == pytest.approx(one["awake"] + one["own"] * one["used"] + one["common"], rel=0.05)
    rows = tabulate_stand_ins(points, models=["tiny"]).rows
    assert [row[0] for row in rows] == ["tiny"] * len(command.KINDS)
    assert (tmp_path / "stand_ins.png").stat().st_size > 10_000
    assert "stand-ins," in capsys.readouterr().out
    command.main([*asked, "--resume"])
    assert "stand-ins," not in capsys.readouterr().out, "all of it was there"
