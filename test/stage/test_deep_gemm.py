"""DeepGEMM's slots: its permutation leaves -1 out, and has no room for an expert twice in a row."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from benchmark.common.paths import ROOT
from served.release import make_env, older_releases_take_long


@cache
def find(tree: Path) -> list[dict[str, Any]]:
    """What `run_deep_gemm.py` found on a release."""
    env = make_env(tree) | {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    env["PYTHONPATH"] += f":{ROOT / 'test'}"
    script = Path(__file__).with_name("run_deep_gemm.py")
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


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
