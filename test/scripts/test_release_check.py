"""The check of a new release: hunk by hunk, with the queue that fits best, and a verdict that is right."""

from pathlib import Path

import pytest

from patching.fake import FILES, LATER_QUEUE, RELEASE, ROUTE, write_queue, write_tree
from scripts.release_check import check_release

METADATA = """\
Metadata-Version: 2.4
Name: sglang
Version: 0
Requires-Python: >=3.11
Requires-Dist: torch==2.14.1
Requires-Dist: cuda-python>=13.0
Requires-Dist: flashinfer_python[cu13]==0.7.2
Requires-Dist: sglang-kernel==0.4.10
Requires-Dist: torch<3; extra == "test"
"""


@pytest.fixture
def queue(tmp_path: Path) -> Path:
    return write_queue(tmp_path / "patches")


def write_release(queue: Path, version: str, **changes: bytes) -> Path:
    """An unpacked wheel; `changes` are contents of files in sglang/srt/, by stem."""
    files = FILES | {f"sglang/srt/{stem}.py": content for stem, content in changes.items()}
    return write_tree(queue.parent / version, files | {"sglang-0.dist-info/METADATA": METADATA.encode()})


def test_a_supported_release(queue: Path) -> None:
    write_release(queue, RELEASE)
    lines, good = check_release(RELEASE, queue, queue.parent)
    assert good
    assert lines == [
        f"SGLang {RELEASE}: torch 2.14.1, CUDA >=13.0, Python >=3.11, sglang-kernel 0.4.10",
        "  fits      sglang/srt/route.py: hunk 1 of shared/route.patch at 1",
        "  fits      sglang/srt/route.py: hunk 2 of shared/route.patch at 4",
        "  fits      sglang/srt/launch.py: hunk 1 of 0.5.21/rest.patch at 3",
        "  fits      sglang/srt/dos.py: hunk 1 of 0.5.21/rest.patch at 3",
        "  fits      sglang/srt/ours.py: hunk 1 of shared/new.patch at 1",
        "release_check: 0.5.21 is supported: its 5 hunks fit, and its files have their pinned hashes",
    ]


def test_a_new_release_that_fits_as_it_is(queue: Path) -> None:
    write_release(queue, "0.5.30", route=b"import this\n" + FILES["sglang/srt/route.py"])
    lines, good = check_release("0.5.30", queue, queue.parent)
    assert good
    assert "  fits      sglang/srt/route.py: hunk 1 of shared/route.patch at 2" in lines
    assert lines[-1] == (
        "release_check: 0.5.30 is not supported yet, but the 5 hunks of the series of 0.5.21 fit; "
        "continue with CONTRIBUTING.md"
    )


def test_a_new_release_that_does_not_fit(queue: Path) -> None:
    """One line is gone, one is there twice, a file is missing, and a file is there that we would add."""
    route = b"import that\n" + FILES["sglang/srt/route.py"].replace(b"import torch", b"import jax")
    tree = write_release(queue, "0.5.30", route=route + b"def route(x):\n    return x\n", ours=b"theirs = 1\n")
    (tree / "sglang/srt/dos.py").unlink()
    lines, good = check_release("0.5.30", queue, queue.parent)
    assert not good
    assert lines[1:-1] == [
        "  DOES NOT  sglang/srt/route.py: hunk 1 of shared/route.patch matches 0 places",
        "            no line 'import torch'",
        "  DOES NOT  sglang/srt/route.py: hunk 2 of shared/route.patch matches 2 places (lines 5, 11)",
        "  fits      sglang/srt/launch.py: hunk 1 of 0.5.21/rest.patch at 3",
        "  DOES NOT  sglang/srt/dos.py: hunk 1 of 0.5.21/rest.patch matches 0 places",
        "            no such file",
        "  DOES NOT  sglang/srt/ours.py: hunk 1 of shared/new.patch matches 0 places",
    ]
    names = "shared/route.patch, 0.5.21/rest.patch, shared/new.patch"
    assert lines[-1] == (
        f"release_check: 0.5.30 is not supported: 3 of 3 patches in the series of 0.5.21 do not fit: {names}"
    )


def test_the_series_that_fits_best_is_tried(queue: Path) -> None:
    """Of two that fit alike the newer one; and a patch on the same matter that fits is named."""
    write_queue(queue, LATER_QUEUE, release="0.5.25")
    write_release(queue, "0.5.30")
    assert "series of 0.5.25 fit;" in check_release("0.5.30", queue, queue.parent)[0][-1]
    moved = ROUTE.replace("import torch", "import jax")
    write_queue(queue, {**LATER_QUEUE, "shared/route-until-0.5.25.patch": moved}, release="0.5.25")
    lines, _ = check_release("0.5.30", queue, queue.parent)
    assert "series of 0.5.21 fit;" in lines[-1]
    write_release(queue, "0.5.31", route=FILES["sglang/srt/route.py"].replace(b"torch", b"jax"), dos=b"")
    lines, _ = check_release("0.5.31", queue, queue.parent)
    assert "            shared/route-until-0.5.25.patch fits" in lines
