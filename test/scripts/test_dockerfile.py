"""The Dockerfile, which nothing builds here: a linter finds no fault, and pip installs what it copies."""

import shutil
import subprocess
import sys
from pathlib import Path

from benchmark.common.paths import ROOT
from dockerfile import DOCKERFILE, list_copied
from sglang_xshare.patching.queue import find_root, list_releases


def test_the_linter_finds_no_fault() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_it_builds_on_the_newest_release() -> None:
    assert f"\nARG SGLANG={list_releases(find_root())[-1]}\n" in DOCKERFILE


def test_pip_installs_what_it_copies(tmp_path: Path) -> None:
    """The package reaches patches, C++ sources and licence through links; one that leads nowhere ends the build."""
    context = tmp_path / "context"
    for source in list_copied():
        (context / source).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(
                ROOT / source, context / source, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / source, context / source)
    links = [file for file in context.rglob("*") if file.is_symlink()]
    assert links
    assert [link for link in links if not link.resolve().is_relative_to(context) or not link.exists()] == []
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", tmp_path / "site", context / "python"], check=True)
    package = tmp_path / "site/sglang_xshare"
    assert list_releases(package / "patches") == list_releases(find_root())
    for file in (ROOT / "sgl-kernel/csrc").iterdir():
        assert (package / "selection/cpu_call/csrc" / file.name).read_bytes() == file.read_bytes()
