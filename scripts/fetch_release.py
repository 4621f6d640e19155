"""Unpack SGLang releases into build/releases/<version>/: pristine sources for the patch lint and the tests.

    python -m scripts.fetch_release 0.5.17 0.5.21 0.5.23

Only the wheel itself is downloaded, without its dependencies. An unpacked release is not downloaded again.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmark.common.paths import RELEASES


def download_wheel(version: str, folder: Path) -> Path:
    """Download the wheel of one release for this Python into `folder`, without its dependencies.

    Raises `subprocess.CalledProcessError` if pip finds no such release, or cannot download it.
    """
    print(f"downloading sglang {version} ...", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary=:all:", "--dest", str(folder), f"sglang=={version}"]
    subprocess.run(pip, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("sglang-*.whl")
    return wheel


def fetch_release(version: str, releases: Path = RELEASES) -> Path:
    """Download and unpack one release. Return its directory, which contains sglang/ and its metadata.

    Raises as `download_wheel` does, and ValueError for a wheel whose version is not that of its name.
    """
    place = releases / version
    if place.is_dir():
        return place
    releases.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=releases, prefix=f".{version}-") as scratch:
        wheel = download_wheel(version, Path(scratch))
        unpacked = Path(scratch) / "unpacked"
        zipfile.ZipFile(wheel).extractall(unpacked)
        if f"'{version}'" not in (unpacked / "sglang/_version.py").read_text():
            raise ValueError(f"{wheel.name}: sglang/_version.py must have the version {version}")
        unpacked.rename(place)  # in one step, so an interrupted download is never taken for a release
    print(f"unpacked into {place}")
    return place


def tell_download(version: str, error: subprocess.CalledProcessError) -> str:
    """Return one line about a failed download, with pip's last line."""
    said = (error.stderr or "").strip().splitlines() or ["no reason given"]
    return f"pip cannot download sglang=={version}, which must be a release on the package index (pip: {said[-1]})"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="+", help="a released version, e.g. 0.5.23")
    for version in parser.parse_args().version:
        try:
            fetch_release(version)
        except subprocess.CalledProcessError as error:
            sys.exit(f"fetch_release: {tell_download(version, error)}")
        except ValueError as error:
            sys.exit(f"fetch_release: {error}")
