"""Upstream's fused Triton runner computes from a layer's selection what plain loops do."""

from pathlib import Path

from served.release import interpret, older_releases_take_long, run_script


@older_releases_take_long
def test_upstreams_runner_takes_what_a_layer_has_chosen(release, patched_release):
    """Its own kernels, interpreted: padding rows, and rows that lose all experts but one."""
    batches = run_script(Path(__file__).with_name("run_moe_runner.py"), interpret(patched_release(release)))
    assert len(batches) == 6
    for batch in batches:
        assert batch["error"] < 3e-3, batch  # it multiplies in fp16
    assert sum(batch["size"] > 0.5 for batch in batches) == 5
