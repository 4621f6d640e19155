"""What reaches an MoE runner of each convention, and what upstream's Triton runner and DeepGEMM's order make of it."""

from functools import cache
from pathlib import Path
from typing import Any

from served.release import interpret, older_releases_take_long, run_script
from sglang_xshare.selection.alignment import count_blocks


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


@cache
def find_batches(tree: Path) -> list[dict[str, Any]]:
    """Return what `run_moe_runner.py` found on a release."""
    return run_script(Path(__file__).with_name("run_moe_runner.py"), interpret(tree))


@older_releases_take_long
def test_upstreams_runner_takes_filled_slots(release, patched_release):
    """Its own kernels, interpreted; a batch of padding rows alone comes to nothing."""
    batches = find_batches(patched_release(release))
    assert len(batches) == 2 * 6
    for batch in batches:
        assert batch["error"] < 3e-3, batch  # it multiplies in fp16
        assert (batch["size"] > 0.5) == (batch["padding"] < batch["rows"]), batch


@older_releases_take_long
def test_upstreams_runner_takes_what_is_handed_over(release, patched_release):
    """The alignment is the kernel's if it can be, and both products cover the blocks that any ids could fill."""
    for batch in find_batches(patched_release(release)):
        rows, block, taken = batch["rows"], batch["block"], batch["taken"]
        assert (block == 16) == (rows <= 32)
        prebuilt = batch["prebuilt"] and rows <= 16
        assert taken == ({"prebuilt": 1} if prebuilt else {}), batch
        if prebuilt:
            assert batch["pairs"] == [count_blocks(32, 4 * rows) * 16] * 2


@cache
def find_orders(tree: Path) -> list[dict[str, Any]]:
    """What `run_deep_gemm.py` found on a release."""
    return run_script(Path(__file__).with_name("run_deep_gemm.py"), interpret(tree))


@older_releases_take_long
def test_dropped_slots_take_no_place_and_add_nothing(release, patched_release):
    """What no product was written to is NaN, so that a place that should not be read would show."""
    found = [batch for batch in find_orders(patched_release(release)) if batch["layout"].startswith("run_")]
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
    largest = {batch["layout"]: batch["largest"] - batch["room"] for batch in find_orders(patched_release(release))}
    assert largest["dropped"] <= 0 < largest["filled"]
