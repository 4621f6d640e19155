"""The table of docs/limits.md says with which MoE runner a policy is served, as the latest release resolves it."""

import subprocess
import sys

import pytest

from benchmark.common.paths import ROOT
from scripts.runners import BEGIN, COLUMNS, PAGE, ROWS
from served.release import LATEST, make_env


@pytest.mark.long
def test_the_table_is_up_to_date(patched_release):
    env = make_env(patched_release(LATEST))
    env["PYTHONPATH"] += f":{ROOT}"
    done = subprocess.run(
        [sys.executable, "-m", "scripts.runners", "--check"], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.splitlines()[-1:] if done.returncode else []) == (0, [])


def test_it_has_every_model_and_gpu():
    table = PAGE.read_text().partition(BEGIN)[2].partition("<!-- end -->")[0].splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in table[2:]] == list(ROWS)
    assert table[0] == f"| model | {' | '.join(COLUMNS)} |"
