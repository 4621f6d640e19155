"""The wheels we make: ours and a patched SGLang's, the same bytes from the same source, and right in every entry."""

import base64
import csv
import hashlib
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from benchmark.common.paths import ROOT
from dockerfile import list_copied
from patching.fake import FILES, PATCHED, RELEASE, write_queue
from scripts.sglang_wheel import make_wheel
from sglang_xshare import __version__
from sglang_xshare.patching import PatchError
from sglang_xshare.patching.queue import find_root, list_releases

SOURCE = (*list_copied(), "scripts")
METADATA = (
    "Metadata-Version: 2.4\nName: sglang\nVersion: 0.5.21\nLicense-File: LICENSE\n\n# SGLang\n\nVersion: 0.5.21\n"
)
TAG = "cp311-cp311-manylinux_2_34_x86_64"


def copy_source(folder: Path) -> Path:
    """A copy of what a wheel is made of."""
    for name in SOURCE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, folder / name)
        else:
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info"))
    return folder


def build_ours(folder: Path) -> Path:
    """The wheel that `make wheel` makes of a copy."""
    venv = Path(sys.executable).parents[1]
    subprocess.run([folder / "scripts/make_wheel.sh"], env=os.environ | {"VENV": str(venv)}, check=True)
    (wheel,) = (folder / "dist").iterdir()
    return wheel


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_ours(copy_source(tmp_path_factory.mktemp("first")))


def check_record(wheel: zipfile.ZipFile, info: str) -> None:
    """RECORD names every file, with its own hash and size."""
    rows = {path: (digest, size) for path, digest, size in csv.reader(wheel.read(f"{info}/RECORD").decode().split())}
    assert rows.pop(f"{info}/RECORD") == ("", "")
    assert sorted(rows) == sorted(set(wheel.namelist()) - {f"{info}/RECORD"})
    for path, (digest, size) in rows.items():
        content = wheel.read(path)
        assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        assert int(size) == len(content)


def test_ours_is_the_same_to_the_byte(ours: Path, tmp_path: Path) -> None:
    """From another folder, with other file times and modes, and with bytecode about."""
    mask = os.umask(0o077)
    try:
        source = copy_source(tmp_path) / "python/sglang_xshare"
        (source / "cli.py").touch()
        (source / "cli.py").chmod(0o600)
        py_compile.compile(str(source / "cli.py"))
        again = build_ours(tmp_path)
    finally:
        os.umask(mask)
    assert again.name == ours.name == f"sglang_xshare-{__version__}-py3-none-any.whl"
    assert again.read_bytes() == ours.read_bytes()


def test_ours_holds_the_queue_a_readme_and_links(ours: Path) -> None:
    info = f"sglang_xshare-{__version__}.dist-info"
    with zipfile.ZipFile(ours) as wheel:
        check_record(wheel, info)
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
        names = set(wheel.namelist())
        assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    queue = {f"sglang_xshare/patches/{file.relative_to(find_root())}" for file in find_root().rglob("*.patch")}
    assert queue < names
    assert (metadata["Version"], metadata["License-Expression"]) == (__version__, "Apache-2.0")
    assert "sglang-xshare = sglang_xshare.__main__:main" in entry_points
    readme = str(metadata.get_payload())
    assert readme == (ROOT / "python/README.md").read_text()
    assert readme.replace("](https://", "").count("](") == 0, "links of a package's page must be absolute"
    releases = list_releases(find_root())
    assert f"SGLang {releases[0]} to {releases[-1]}" in readme
    assert all(", https://" in url for url in metadata.get_all("Project-URL") or [""])


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A small wheel of SGLang, as upstream would publish it."""
    info = f"sglang-{RELEASE}.dist-info"
    wheel = tmp_path / f"sglang-{RELEASE}-{TAG}.whl"
    licences = {f"{info}/licenses/LICENSE": b"Apache", f"{info}/METADATA": METADATA.encode(), f"{info}/WHEEL": b"Tag\n"}
    with zipfile.ZipFile(wheel, "w") as target:
        for path, content in (FILES | licences | {f"{info}/RECORD": b"old\n"}).items():
            entry = zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100755 if "launch" in path else 0o100644) << 16
            target.writestr(entry, content)
    return wheel


def test_a_patched_sglang_is_upstreams_but_for_the_queue(upstream: Path, tmp_path: Path) -> None:
    queue = write_queue(tmp_path / "patches")
    made = make_wheel(upstream, queue, tmp_path / "dist")
    version = f"{RELEASE}+xshare.{__version__}"
    assert made == tmp_path / "dist" / f"sglang-{version}-{TAG}.whl"
    info = f"sglang-{version}.dist-info"
    with zipfile.ZipFile(made) as wheel:
        check_record(wheel, info)
        contents = {name: wheel.read(name) for name in wheel.namelist()}
        modes = {entry.filename: entry.external_attr >> 16 for entry in wheel.infolist()}
    package = {name: content for name, content in contents.items() if "/.xshare/" not in name and info not in name}
    assert package == PATCHED
    assert (modes["sglang/srt/launch.py"], modes["sglang/srt/ours.py"]) == (0o100755, 0o100644)
    kept = {"LICENSE": b"Apache", "NOTICE-sglang-xshare": contents[f"{info}/licenses/NOTICE-sglang-xshare"]}
    assert {name: contents[f"{info}/licenses/{name}"] for name in kept} == kept
    notice = kept["NOTICE-sglang-xshare"].decode()
    for path in PATCHED:
        assert (f"\n  {path}\n" in notice) == (PATCHED[path] != FILES.get(path))
    metadata = Parser().parsestr(contents[f"{info}/METADATA"].decode())
    assert (metadata["Version"], metadata["Requires-Dist"]) == (version, f"sglang-xshare=={__version__}")
    assert metadata.get_all("License-File") == ["LICENSE", "NOTICE-sglang-xshare"]
    assert metadata.get_payload() == "# SGLang\n\nVersion: 0.5.21\n"
    assert make_wheel(upstream, queue, tmp_path / "again").read_bytes() == made.read_bytes()


def test_a_release_without_a_series_makes_no_wheel(upstream: Path, tmp_path: Path) -> None:
    other = write_queue(tmp_path / "other", release="0.5.9")
    with pytest.raises(PatchError, match=r"SGLang 0\.5\.21 is not supported; supported: 0\.5\.9"):
        make_wheel(upstream, other, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()
