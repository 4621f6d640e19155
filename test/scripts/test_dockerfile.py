"""The Dockerfile, which nothing builds here: a linter finds no fault, and what it copies and names is there."""

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

from benchmark.common.paths import ROOT
from sglang_xshare.patching.queue import find_root, list_releases

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_linter_finds_no_fault() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_it_builds_on_the_newest_release() -> None:
    assert f"\nARG SGLANG={list_releases(find_root())[-1]}\n" in DOCKERFILE


def test_what_it_copies_is_there_and_not_ignored() -> None:
    copied = re.findall(r"^COPY (\S+) (\S+)$", DOCKERFILE, re.MULTILINE)
    assert copied
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert ignored[0] == "*"
    for source, target in copied:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored
        assert not any(fnmatch(source, pattern) for pattern in ignored[1:])
        assert target == f"/opt/sglang-xshare/{source}", "links between them must hold there too"
