"""Write patches/<version>/hashes, the sha256 of every file that the release's series changes.

The hashes are those of the original files in the release. The hash of a file that the series adds consists of zeros.

    python -m scripts.pin_release 0.5.24

Run it when a series changes, or when the queue moves to a new release.
"""

import argparse
from pathlib import Path

from benchmark.common.paths import RELEASES
from scripts.fetch_release import fetch_release
from sglang_xshare.patching.patch import parse_patch
from sglang_xshare.patching.queue import find_root, read_series
from sglang_xshare.patching.state import read, read_pristine
from sglang_xshare.patching.tree import ABSENT, digest, find_tree


def pin_release(version: str, patches: Path, releases: Path = RELEASES) -> int:
    """Write the hashes in the format of sha256sum, and return the number of files."""
    paths = {
        file.path
        for name in read_series(patches, version)
        for file in parse_patch((patches / name).read_text(), name).files
    }
    tree = find_tree(fetch_release(version, releases))
    pristine = read_pristine(tree, read(tree), paths)
    hashes = {path: digest(pristine[path]) if path in pristine else ABSENT for path in paths}
    lines = [f"{hashes[path]}  {path}\n" for path in sorted(hashes)]
    (patches / version / "hashes").write_text("".join(lines))
    return len(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="+", help="a release with a series in patches/")
    for version in parser.parse_args().version:
        print(f"pin_release: {pin_release(version, find_root())} files of {version}")
