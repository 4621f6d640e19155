"""The comparison by upstream's own tests, on a made-up SGLang and a made-up checkout of its repository."""

import re
import subprocess
from pathlib import Path

import pytest

from patching.fake import RELEASE, write_queue, write_tree
from scripts.upstream_tests import UNIT, check_release, compare, copy_patched

TESTS = {
    "layers/moe/test_size.py": """
import unittest
from sglang.srt import dos
class TestSize(unittest.TestCase):
    def test_published(self): assert dos.SIZE == 1
    def test_either(self): assert dos.SIZE
    def test_neither(self): assert dos.SIZE == 3
    def test_patched(self): assert dos.SIZE == 2
""",
    "managers/test_import.py": """
import pytest
from sglang.srt.launch import main
if main > 1:
    raise ImportError
@pytest.mark.parametrize("size", [0.5])
def test_runs(size): pass
""",
    "managers/test_gpu.py": "import a_package_that_is_not_there\ndef test_runs(): pass\n",
    "speculative/test_size.py": "import pytest\ndef test_runs(): pytest.skip()\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    write_tree(root / UNIT, {name: text.encode() for name, text in TESTS.items()})
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "tests"], ["tag", f"v{RELEASE}"]):
        subprocess.run([*git, *command], check=True)
    return root


def test_what_passes_on_the_published_package_alone(checkout: Path, tmp_path: Path) -> None:
    published = write_tree(tmp_path / "published")
    with copy_patched(published, write_queue(tmp_path / "patches")) as patched:
        found = compare(checkout, published, patched, tmp_path)
    assert [re.sub(" +", " ", line) for line in found.describe()] == [
        " published patched",
        " skipped passed failed skipped passed failed",
        "layers/moe 0 2 2 0 2 2",
        "managers 0 1 1 0 0 2",
        "model_executor 0 0 0 0 0 0",
        "speculative 1 0 0 1 0 0",
        "server_args 0 0 0 0 0 0",
        "passes on the published package alone: layers/moe/test_size.py::TestSize::test_published",
        "passes on the published package alone: managers/test_import.py::test_runs[0.5]",
    ]


def test_only_the_installed_release(checkout: Path, tmp_path: Path) -> None:
    check_release(checkout, RELEASE)
    for place, release, message in (
        (checkout, "0.5.22", "v0.5.21 is checked out; allowed: v0.5.22, the installed one"),
        (tmp_path, RELEASE, "no release is checked out"),
    ):
        with pytest.raises(ValueError, match=message):
            check_release(place, release)
