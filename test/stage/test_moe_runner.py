"""Upstream's fused Triton runner computes from filled slots what the selection says."""

from pathlib import Path

from served.release import interpret, older_releases_take_long, run_script


@older_releases_take_long
def test_upstreams_runner_takes_filled_slots(release, patched_release):
    """Its own kernels, interpreted; a batch of padding rows alone comes to nothing."""
    batches = run_script(Path(__file__).with_name("run_moe_runner.py"), interpret(patched_release(release)))
    assert len(batches) == 6
    for batch in batches:
        assert batch["error"] < 3e-3, batch  # it multiplies in fp16
        assert (batch["size"] > 0.5) == (batch["padding"] < batch["rows"]), batch
