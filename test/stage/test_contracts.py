"""What reaches an MoE runner of each convention: slots that it takes, the selection's output, no expert used."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from served.release import interpret, older_releases_take_long, run_script
from sglang_xshare.stage.layer import DROPPED
from stage.contracts import check


@cache
def find(tree: Path) -> list[dict[str, Any]]:
    """What `run_contracts.py` found on a release."""
    # Interpreted: before 0.5.23 a Triton kernel fills an AMD server's padding rows on every device.
    return run_script(Path(__file__).with_name("run_contracts.py"), interpret(tree))


@older_releases_take_long
def test_runners_get_what_they_take_and_compute_the_selection(release, patched_release):
    found = find(patched_release(release))
    assert len(found) == 2 * 5 * 4 * 4 + 2 * 4 + 5 * 4
    assert [case for case in found if case["problems"]] == []
    assert [case for case in found if not case["error"] < 1e-4] == []


@older_releases_take_long
def test_no_slot_uses_an_expert_or_another_replica_of_one(release, patched_release):
    assert [case for case in find(patched_release(release)) if case["used"]] == []


BROKEN = {
    "ids are int32": (torch.tensor([[1, 0]]), torch.ones(1, 2)),
    "weights are float32": (torch.tensor([[1, 0]]).int(), torch.ones(1, 2).double()),
    "ids are in range": (torch.tensor([[1, 4]]).int(), torch.ones(1, 2)),
    "weights are finite": (torch.tensor([[1, 0]]).int(), torch.tensor([[1.0, torch.nan]])),
    "a slot without an expert weighs nothing": (torch.tensor([[1, -1]]).int(), torch.ones(1, 2)),
    "a row's experts are distinct": (torch.tensor([[1, 1]]).int(), torch.tensor([[1.0, 0.0]])),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_the_check_can_fail(rule):
    assert check(*BROKEN[rule], 4, DROPPED) == [rule]
