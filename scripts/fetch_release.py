"""Download SGLang releases and unpack them into build/releases/<version>/, for the patch lint and the tests.

    python -m scripts.fetch_release 0.5.17 0.5.21 0.5.23

Dependencies are not downloaded. A release that is already unpacked is not downloaded again.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmark.common.paths import RELEASES


def download_wheel(version: str, folder: Path) -> Path:
    """Download the wheel of a release for this Python version, without its dependencies.

    Raises `subprocess.CalledProcessError` if pip cannot find or download the release.
    """
    print(f"downloading sglang {version} ...", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary=:all:", "--dest", str(folder), f"sglang=={version}"]
    subprocess.run(pip, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("sglang-*.whl")
    return wheel


def fetch_release(version: str, releases: Path = RELEASES) -> Path:
    """Download and unpack a release, and return its folder. The folder contains sglang/ and the wheel's metadata.

    Raises `subprocess.CalledProcessError` if the download fails. Raises ValueError if the wheel contains another
    version than its name says.
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
        unpacked.rename(place)  # one step, so an interrupted download leaves no incomplete release
    print(f"unpacked into {place}")
    return place


def tell_download(version: str, error: subprocess.CalledProcessError) -> str:
    """Return a one-line error message for a failed download. It contains pip's last line."""
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
