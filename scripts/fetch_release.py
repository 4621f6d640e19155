"""Unpack SGLang releases into build/releases/<version>/: pristine sources for the patch lint and the tests.

    python -m scripts.fetch_release 0.5.17 0.5.21 0.5.23

Only the wheel itself is downloaded, without its dependencies. A release that is there already is left alone.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

RELEASES = Path(__file__).resolve().parents[1] / "build/releases"


def fetch_release(version: str, releases: Path = RELEASES) -> Path:
    """Download and unpack one release; returns its directory, which contains sglang/ and its metadata.

    Raises:
        subprocess.CalledProcessError: pip found no such release, or could not download it.
        ValueError: the wheel holds another version than its name says.
    """
    place = releases / version
    if place.is_dir():
        return place
    releases.mkdir(parents=True, exist_ok=True)
    print(f"fetch_release: sglang {version} ...", end=" ", flush=True)
    with tempfile.TemporaryDirectory(dir=releases, prefix=f".{version}-") as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--only-binary=:all:", "--dest", scratch, f"sglang=={version}"], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "unpacked"
        zipfile.ZipFile(wheel).extractall(unpacked)
        if f"'{version}'" not in (unpacked / "sglang/_version.py").read_text():
            raise ValueError(f"{wheel.name}: sglang/_version.py does not say {version}")
        unpacked.rename(place)  # all at once: a stopped download leaves no half release
    print(f"unpacked into {place}")
    return place


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="+", help="a released version, e.g. 0.5.23")
    for version in parser.parse_args().version:
        try:
            fetch_release(version)
        except subprocess.CalledProcessError:
            sys.exit(
                f"fetch_release: pip could not download sglang=={version}; allowed: a release on the package index"
            )
        except ValueError as error:
            sys.exit(f"fetch_release: {error}")
