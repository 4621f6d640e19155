"""DeepGEMM's slots: its permutation leaves -1 out, and has no room for an expert twice in a row."""

from functools import cache
from pathlib import Path
from typing import Any

from served.release import interpret, older_releases_take_long, run_script


@cache
def find(tree: Path) -> list[dict[str, Any]]:
    """What `run_deep_gemm.py` found on a release."""
    return run_script(Path(__file__).with_name("run_deep_gemm.py"), interpret(tree))


@older_releases_take_long
def test_dropped_slots_take_no_place_and_add_nothing(release, patched_release):
    """What no product was written to is NaN, so that a place that should not be read would show."""
    found = [batch for batch in find(patched_release(release)) if batch["layout"].startswith("run_")]
    assert [(batch["layout"], batch["rows"]) for batch in found] == [
        (layout, rows) for layout in ("run_masked", "run_compact") for rows in (1, 7, 40)
    ]
    for batch in found:
        assert batch["places"], "distinct, and inside the buffer"
        assert batch["error"] < 1e-4
        assert batch["largest"] <= batch["room"]


@older_releases_take_long
def test_an_expert_has_room_for_each_row_once(release, patched_release):
    """The reason for the convention: filled slots of one row would run into the next expert's rows."""
    largest = {batch["layout"]: batch["largest"] - batch["room"] for batch in find(patched_release(release))}
    assert largest["dropped"] <= 0 < largest["filled"]
