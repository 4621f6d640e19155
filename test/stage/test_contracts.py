"""What reaches an MoE runner of each convention: slots that it takes, the selection's output, no expert used."""

from functools import cache
from pathlib import Path
from typing import Any

from served.release import interpret, older_releases_take_long, run_script


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
