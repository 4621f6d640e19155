"""What reaches an MoE runner of each convention, and what upstream's Triton runner and DeepGEMM's order make of it."""

from served.release import older_releases_take_long
from sglang_xshare.selection.alignment import count_blocks


@older_releases_take_long
def test_runners_get_what_they_take_and_compute_the_selection(release, ask):
    """No slot uses an expert, or another replica of one, beyond the active ones. The script is interpreted: before
    0.5.23 a Triton kernel fills an AMD server's padding rows on every device.
    """
    found = ask("run_contracts.py", release)
    assert len(found) == 2 * 5 * 4 * 4 + 2 * 4 + 5 * 4
    assert [case for case in found if case["problems"] or case["used"] or not case["error"] < 1e-4] == []


@older_releases_take_long
def test_upstreams_runner_takes_filled_slots_and_what_is_handed_over(release, ask):
    """Its own kernels, interpreted; a batch of padding rows alone comes to nothing. The alignment is the kernel's if it
    can be, and both products cover the blocks that any ids could fill.
    """
    batches = ask("run_moe_runner.py", release)
    assert len(batches) == 2 * 6
    for batch in batches:
        rows = batch["rows"]
        assert batch["error"] < 3e-3, batch  # it multiplies in fp16
        assert (batch["size"] > 0.5) == (batch["padding"] < rows), batch
        assert (batch["block"] == 16) == (rows <= 32)
        prebuilt = batch["prebuilt"] and rows <= 16
        assert batch["taken"] == ({"prebuilt": 1} if prebuilt else {}), batch
        if prebuilt:
            assert batch["pairs"] == [count_blocks(32, 4 * rows) * 16] * 2


@older_releases_take_long
def test_dropped_slots_take_no_place_and_add_nothing(release, ask):
    """Places to which no product was written are NaN, so a wrong read shows. An expert has room for each row once.

    This is the reason for the convention: the filled slots of one row would use the places of the next rows.
    """
    *found, dropped, filled = ask("run_deep_gemm.py", release)
    assert [(batch["layout"], batch["rows"]) for batch in found] == [
        (layout, rows) for layout in ("run_masked", "run_compact") for rows in (1, 7, 40)
    ]
    for batch in found:
        assert batch["places"], "distinct, and inside the buffer"
        assert batch["error"] < 1e-4
        assert batch["largest"] <= batch["room"]
    assert dropped["largest"] <= dropped["room"] == filled["room"] < filled["largest"]
