"""`python -m benchmark.governor`: its replay in pieces is the one in a whole, and what its table says."""

from typing import Any

import pytest
import torch

from benchmark.common.variant import parse_plan
from benchmark.governor import __main__ as command
from benchmark.governor.report import tabulate_governor
from benchmark.governor.traffic import STRETCHES, make_traffic, replay, replay_governed
from benchmark.quality.model import load_model
from benchmark.quality.text import load_sequences
from sglang_xshare.policies.governor import Governor

PROMPT, STEPS, PER_DOMAIN = 8, 10, 2
GOVERNOR = Governor(0.9, "add", 1, 40, every=3)


@pytest.fixture(scope="module")
def traffic(tiny_model):
    sequences = load_sequences(tiny_model / "heldout", tiny_model, PROMPT + STEPS + 1, PER_DOMAIN)
    return make_traffic(load_model(tiny_model), sequences, PROMPT)


def test_the_stretches_are_those_asked_for(traffic):
    assert [one.name.partition(" x ")[0] for one in traffic] == [name for name, _ in STRETCHES]
    assert {one.tokens.shape[1] for one in traffic} == {STEPS + 1}
    assert [one.batch for one in traffic] == [max(PER_DOMAIN // part, 2) for _, part in STRETCHES]


def test_steps_decided_on_one_after_another_are_those_decoded_at_once(traffic):
    """Under a governor whose every budget holds all that a batch wants: they route as the model does."""
    governor = Governor(0.9, "add", 57, 60, every=3)
    whole, pieces = replay(traffic, parse_plan("vanilla")), replay_governed(traffic, governor, "xshare:k0=1,add=")
    torch.testing.assert_close(pieces.nats, whole.nats, rtol=0, atol=1e-4)
    torch.testing.assert_close(pieces.kept_mass, whole.kept_mass, rtol=0, atol=1e-4)
    assert torch.equal(pieces.active, whole.active)


def test_a_budget_is_in_force_until_the_next_decision(traffic):
    replayed = replay_governed(traffic, GOVERNOR, "xshare:k0=1,add=")
    assert replayed.budgets is not None
    course = replayed.budgets.flatten().tolist()
    assert course[: GOVERNOR.every + 1] == [GOVERNOR.high] * (GOVERNOR.every + 1)
    changes = [at for at in range(1, len(course)) if course[at] != course[at - 1]]
    assert all(at % (GOVERNOR.every + 1) == 0 for at in changes)
    assert replayed.moves == len(changes) > 0


def point(family: str, experts: float, loss: float, **what: Any) -> dict[str, Any]:
    figures = {"active_experts": experts, "kept_mass": 0.9, "loss": {"delta": loss, "error": 0.001}}
    return {"family": family, **figures, **what}


def test_experts_saved_are_those_of_fixed_budgets_at_the_same_loss():
    points = {
        "few": point("xshare:k0=1,add=", 10, 0.03, fixed=2),
        "many": point("xshare:k0=1,add=", 20, 0.01, fixed=8),
        "governed": point("xshare:k0=1,add=", 12, 0.02, floor=0.9, moves=3),
        "beyond": point("xshare:k0=1,add=", 5, 0.2, floor=0.5, moves=1),
        "xshare:k0=1,mass=0.9": point("xshare:k0=1,mass=", 18, 0.02, fixed=0.9),
    }
    rows = {row[0]: row[4:] for row in tabulate_governor(points).rows}
    assert rows == {
        "governed": ["15.0 [14.5, 15.5]", "20.0%", "3"],
        "beyond": ["", "", "1"],
        "xshare:k0=1,mass=0.9": ["15.0 [14.5, 15.5]", "-20.0%", ""],
    }


@pytest.mark.long
def test_the_command_measures_into_a_record(tmp_path, capsys):
    small = ["--per-domain", "2", "--prompt", "8", "--steps", "8", "--every", "2", "--out", str(tmp_path)]
    command.main(small)
    assert "Record: " in capsys.readouterr().out
    assert (tmp_path / "governor.png").exists()
    command.main([*small, "--resume"])
    assert " experts, " not in capsys.readouterr().out, "nothing is measured twice"
