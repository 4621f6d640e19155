"""The Dockerfile, which nothing builds here: a linter finds no fault. `test_wheels` builds what it copies."""

import sys
from pathlib import Path

from benchmark.common.paths import ROOT
from dockerfile import DOCKERFILE
from programs import run_program
from sglang_xshare.patching.queue import find_root, list_releases


def test_the_linter_finds_no_fault() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = run_program(hadolint, ROOT / "Dockerfile")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_it_builds_on_the_newest_release() -> None:
    assert f"\nARG SGLANG={list_releases(find_root())[-1]}\n" in DOCKERFILE
