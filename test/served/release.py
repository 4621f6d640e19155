"""The supported releases, and what a process needs to run one without a GPU."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmark.common.paths import ROOT

LATEST, OLDER = "0.5.23", ("0.5.17", "0.5.21")
OLDEST = OLDER[0]
"""Real servers run on `LATEST` and `OLDEST`; `test_releases_between.py` serves each other release once. Starts, whose
arguments every release resolves in its own way, are tested on all of `OLDER`.
"""
CPU = ("--device", "cpu", "--attention-backend", "torch_native")

OLDEST_LONG = pytest.param(OLDEST, marks=pytest.mark.long)
both_releases = pytest.mark.parametrize("release", [LATEST, OLDEST])
oldest_takes_long = pytest.mark.parametrize("release", [LATEST, OLDEST_LONG])
older_releases_take_long = pytest.mark.parametrize(
    "release", [LATEST, *(pytest.param(release, marks=pytest.mark.long) for release in OLDER)]
)


def make_env(tree: Path) -> dict[str, str]:
    """The environment of a process that runs the release in `tree`."""
    own = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return os.environ | own | {"PYTHONPATH": f"{tree}:{ROOT / 'python'}"}


def run_script(script: Path, env: Mapping[str, str], asked: object = None) -> list[Any]:
    """What the script prints in JSON, a line each, when it is asked this on stdin; what SGLang logs is passed over."""
    done = subprocess.run(
        [sys.executable, script], input=json.dumps(asked), env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "null"))]


def interpret(tree: Path) -> dict[str, str]:
    """The environment of a script of `test/stage`: Triton's interpreter, and what torch compiles, eagerly."""
    env = make_env(tree) | {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    return env | {"PYTHONPATH": f"{env['PYTHONPATH']}:{ROOT / 'test'}:{ROOT}"}
