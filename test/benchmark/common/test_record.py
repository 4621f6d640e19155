"""An experiment's record: on disk after every point, continued by the next run, and never silently replaced."""

import json
import subprocess
import sys

import pytest

from benchmark.common.paths import RESULTS, ROOT
from benchmark.common.record import Record, last_session, read_record

KEPT = [path for path in RESULTS.rglob("*.json") if "moe-configs" not in path.parts]
"""Records: the others are launches for SGLang's kernels."""


def test_a_killed_run_leaves_its_points_with_where_they_were_measured_and_the_next_goes_on(tmp_path):
    script = f"""
import os, signal
from pathlib import Path
from benchmark.common.record import Record
record = Record(Path({str(tmp_path)!r}), "layer", ["first"])
for number in range(3):
    record.add(str(number), us=number)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == -9
    record = Record(tmp_path, "layer", ["second"])
    assert [str(number) in record for number in range(4)] == [True, True, True, False]
    record.add("3", us=3.0000004)
    content = json.loads(record.path.read_text())
    assert [(point["session"], point["us"]) for point in content["points"].values()] == [(0, 0), (0, 1), (0, 2), (1, 3)]
    first, second = content["sessions"]
    assert (first["command"], second["command"]) == (["first"], ["second"])
    assert second["hardware"].keys() >= {"gpu", "cpu"}
    assert second["versions"]["torch"]
    assert "commit" in second
    assert last_session({"sessions": [second, first | {"date": "1"}]}) == second


def test_a_number_that_is_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        Record(tmp_path, "layer", []).add("copy", gb_per_s=float("nan"))


@pytest.mark.parametrize("text", ["{", '{"stage": "layer", "sessions": [], "points": {}}'])
def test_a_file_that_is_no_record_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "layer.json").write_text(text)
    with pytest.raises(ValueError, match=r"layer\.json must be a record") as refused:
        Record(tmp_path, "layer", [])
    assert "\n" not in str(refused.value)
    assert (tmp_path / "layer.json").read_text() == text


def test_paths_of_the_checkout_are_written_as_from_there(tmp_path):
    arguments = {"model": ROOT / "checkpoints" / "tiny", "here": ROOT, "elsewhere": tmp_path / "x"}
    record = Record(tmp_path, "serving", ["python"], arguments)
    record.add("rounds", command=[f"{ROOT}/.venv/bin/python", "--texts", str(ROOT / "texts")])
    content = read_record(record.path, "serving")
    assert content["arguments"] == {"model": "checkpoints/tiny", "here": ".", "elsewhere": str(tmp_path / "x")}
    assert content["points"]["rounds"]["command"] == [".venv/bin/python", "--texts", "texts"]
    assert Record(tmp_path, "serving", ["python"], arguments).points == record.points


def test_what_is_kept_was_measured_on_committed_source():
    """Nobody can check out what else was measured."""
    sessions = [(path, session) for path in KEPT for session in read_record(path)["sessions"]]
    assert [str(path) for path, session in sessions if session["commit"].endswith("-dirty")] == []
