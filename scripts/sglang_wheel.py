"""Build a wheel of an SGLang release with all patches applied. The wheel has a local version.

    python -m scripts.sglang_wheel 0.5.23

All files except the patched ones are identical to the files in SGLang's wheel. RECORD is written again. The licence is
kept, and a notice next to it lists the changes. The new wheel depends on this version of sglang-xshare. The build is
reproducible: the same input gives the same bytes.
"""

import argparse
import base64
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from scripts.fetch_release import download_wheel, tell_download
from sglang_xshare import __version__
from sglang_xshare.patching import PatchError, apply
from sglang_xshare.patching.queue import Queue, find_root, load_queue
from sglang_xshare.patching.state import STORE
from sglang_xshare.patching.tree import ABSENT

DIST = Path(__file__).resolve().parents[1] / "dist"
DATE = (2020, 2, 2, 0, 0, 0)  # the date of every file in the wheel, for reproducible builds


def make_wheel(upstream: Path, root: Path, out: Path) -> Path:
    """Patch a wheel of SGLang with the queue in `root`, and return the path of the new wheel in `out`.

    Raises PatchError if the queue does not support the release or its files.
    """
    name, version, *tags = upstream.stem.split("-")
    local = f"{version}+xshare.{__version__}"
    old, new = f"{name}-{version}.dist-info/", f"{name}-{local}.dist-info/"
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(upstream) as source:
        tree = Path(scratch)
        source.extractall(tree)
        apply(tree, root)
        infos = {info.filename: info for info in source.infolist() if not info.is_dir()}
        queue = load_queue(root, version)
        added = sorted(path for path in queue.hashes if path not in infos)
        added += sorted(str(file.relative_to(tree)) for file in (tree / STORE).rglob("*") if file.is_file())
        contents = {path: (tree / path).read_bytes() for path in [*infos, *added]}
    contents[f"{old}METADATA"] = _rename(contents[f"{old}METADATA"].decode(), version, local).encode()
    contents[f"{old}licenses/NOTICE-sglang-xshare"] = _write_notice(queue, local).encode()
    del contents[f"{old}RECORD"]
    renamed = {path.replace(old, new, 1) if path.startswith(old) else path: path for path in contents}
    out.mkdir(parents=True, exist_ok=True)
    wheel = out / "-".join([name, local, *tags])
    half = wheel.with_name(f".{wheel.name}")
    with zipfile.ZipFile(half, "w", zipfile.ZIP_DEFLATED) as target:
        record = []
        for path, known in renamed.items():
            _write(target, path, contents[known], infos.get(known))
            digest = base64.urlsafe_b64encode(hashlib.sha256(contents[known]).digest()).decode().rstrip("=")
            record.append(f"{path},sha256={digest},{len(contents[known])}\n")
        _write(target, f"{new}RECORD", "".join([*record, f"{new}RECORD,,\n"]).encode(), None)
    return half.rename(wheel.with_name(f"{wheel.name}.whl"))


def _write(target: zipfile.ZipFile, path: str, content: bytes, upstream: zipfile.ZipInfo | None) -> None:
    info = zipfile.ZipInfo(path, DATE)
    info.external_attr = upstream.external_attr if upstream else 0o100644 << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    target.writestr(info, content)


def _rename(metadata: str, version: str, local: str) -> str:
    """Return the metadata with the local version and with sglang-xshare as an additional dependency."""
    headers, blank, body = metadata.partition("\n\n")
    assert f"\nVersion: {version}\n" in headers
    headers = headers.replace(f"\nVersion: {version}\n", f"\nVersion: {local}\n", 1)
    added = f"\nLicense-File: NOTICE-sglang-xshare\nRequires-Dist: sglang-xshare=={__version__}"
    return headers + added + blank + body


def _write_notice(queue: Queue, local: str) -> str:
    changed = [path for path, wanted in queue.hashes.items() if wanted != ABSENT]
    added = [path for path, wanted in queue.hashes.items() if wanted == ABSENT]
    patches = [f"  {patch.name}: {patch.header['Description']}" for patch in queue.patches]
    lines = [
        f"sglang {local} is SGLang {queue.release} as published, changed by sglang-xshare {__version__}.",
        "Both are under the Apache License 2.0; SGLang's own LICENSE is beside this file.",
        "",
        *("Changed files:", *(f"  {path}" for path in changed)),
        *("Added files:", *(f"  {path}" for path in [*added, f"{STORE}/"])),
        *("By these patches:", *patches),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="a supported release, e.g. 0.5.23")
    version = parser.parse_args().version
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(make_wheel(download_wheel(version, Path(folder)), find_root(), DIST))
        except subprocess.CalledProcessError as error:
            sys.exit(f"sglang_wheel: {tell_download(version, error)}")
        except PatchError as error:
            sys.exit(f"sglang_wheel: {error}")
