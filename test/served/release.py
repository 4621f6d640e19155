"""The supported releases, and what a process needs to run one without a GPU."""

import os
from pathlib import Path

import pytest

from benchmark.common.paths import ROOT

LATEST, OLDER = "0.5.23", ("0.5.17", "0.5.21")
CPU = ("--device", "cpu", "--attention-backend", "torch_native")

every_release = pytest.mark.parametrize("release", [*OLDER, LATEST])
older_releases_take_long = pytest.mark.parametrize(
    "release", [LATEST, *(pytest.param(release, marks=pytest.mark.long) for release in OLDER)]
)


def make_env(tree: Path) -> dict[str, str]:
    """The environment of a process that runs the release in `tree`."""
    own = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return os.environ | own | {"PYTHONPATH": f"{tree}:{ROOT / 'python'}"}
