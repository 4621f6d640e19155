"""SGLang's benchmark of one batch runs the model without a scheduler, and so without a log interval."""

import json
import subprocess
import sys

import pytest

from served.answers import LAYERS, policy
from served.release import CPU, make_env, oldest_takes_long

NEW_TOKENS = 6
PROMPTS = 3
"""What upstream's test of correctness has."""


@pytest.mark.long
@oldest_takes_long
def test_its_trace_has_every_step(release, tiny_model, patched_release, tmp_path):
    """Its prompts come of the tokenizer: its random ones are beyond the small checkpoint's vocabulary."""
    tree, trace = patched_release(release), tmp_path / "trace.jsonl"
    moved = (tree / "sglang/benchmark/one_batch.py").is_file()
    module = "sglang.benchmark.one_batch" if moved else "sglang.bench_one_batch"
    flags = ["--correctness-test", "--output-len", str(NEW_TOKENS), "--expert-policy-trace", str(trace)]
    command = [sys.executable, "-m", module, "--model-path", str(tiny_model), *CPU, "--dtype", "float32", *flags]
    done = subprocess.run(
        [*command, *policy("xshare", k0=1, add=8)], env=make_env(tree), capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(records) == (NEW_TOKENS - 1) * LAYERS, "the first token is the prefill's"
    assert {record["batch_size"] for record in records} == {PROMPTS}
    assert all(record["experts_after"] < record["experts_before"] for record in records)
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "Expert policy, at the end: " in line]
    assert f"policy steps: {NEW_TOKENS - 1}, vanilla steps: prefill 2" in line
