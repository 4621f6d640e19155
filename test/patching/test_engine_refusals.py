"""What apply and revert refuse, in one line that names it, and without a change."""

import pytest

from patching.fake import RELEASE, refused, write_queue
from sglang_xshare.patching import PatchError, apply, check_patched, revert
from sglang_xshare.patching import queue as queues
from sglang_xshare.patching.state import STORE


def test_an_unsupported_release_is_refused(tree, queue):
    (tree / "sglang/_version.py").write_text("__version__ = version = '0.5.22'\n")
    write_queue(queue, release="0.5.9")
    assert refused(lambda: apply(tree, queue), tree) == "SGLang 0.5.22 is not supported; supported: 0.5.9, 0.5.21"


def test_the_release_is_read_from_metadata_too(tree, queue):
    (tree / "sglang/_version.py").unlink()
    assert "neither sglang/_version.py nor " in refused(lambda: apply(tree, queue), tree)
    (tree / "sglang-0.5.21.dist-info").mkdir()
    (tree / "sglang-0.5.21.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.21\n")
    assert "nothing to do" not in apply(tree, queue)


def test_another_content_of_a_known_release_is_refused(tree, queue):
    file = tree / "sglang/srt/dos.py"
    file.write_bytes(file.read_bytes() + b"# local change\r\n")
    line = refused(lambda: apply(tree, queue), tree)
    assert line.startswith("sglang/srt/dos.py: sha256 ")
    assert len([word for word in line.split() if word.endswith("…")]) == 2  # found and expected


def test_an_unlisted_file_is_refused(tree, queue):
    hashes = queue / RELEASE / "hashes"
    hashes.write_text("".join(line for line in hashes.read_text().splitlines(keepends=True) if "dos" not in line))
    assert "sglang/srt/dos.py is not in patches/0.5.21/hashes" in refused(lambda: apply(tree, queue), tree)


def test_a_link_is_refused(tree, queue, tmp_path):
    (tree / "sglang/srt/dos.py").rename(tmp_path / "elsewhere.py")
    (tree / "sglang/srt/dos.py").symlink_to(tmp_path / "elsewhere.py")
    assert "dos.py: must be a plain file (got a link)" in refused(lambda: apply(tree, queue), tree)


@pytest.mark.parametrize("edit", [lambda file: file.write_text("mine = 1\n"), lambda file: file.unlink()])
def test_a_file_edited_after_patching_is_refused_by_name(tree, queue, edit):
    apply(tree, queue)
    edit(tree / "sglang/srt/route.py")
    for run in (lambda: revert(tree), lambda: apply(tree, queue)):
        assert refused(run, tree).startswith(f"{tree}/sglang/srt/route.py: edited after it was patched")
    with pytest.raises(PatchError, match=r"sglang/srt/route\.py: edited after it was patched"):
        check_patched(tree, queue)


def test_a_damaged_stored_copy_is_refused(tree, queue):
    apply(tree, queue)
    (tree / STORE / "sglang/srt/dos.py.pristine").write_text("")
    with pytest.raises(PatchError, match="damaged copy"):
        revert(tree)


@pytest.mark.parametrize("text", ["", "{}", '{"files": []}', '{"files": {"a": 1}}', "[]"])
def test_a_foreign_state_file_is_refused(tree, queue, text):
    apply(tree, queue)
    (tree / STORE / "state.json").write_text(text)
    assert "not a state file of this program" in refused(lambda: revert(tree), tree)


@pytest.mark.parametrize(("link", "found"), [("../../patches", "a plain file"), (None, "nothing")])
def test_a_checkout_without_symbolic_links_is_named(tree, tmp_path, monkeypatch, link, found):
    """A clone with core.symlinks=false, and a ZIP, hold a file with the path instead."""
    package = tmp_path / "sglang_xshare"
    (package / "patching").mkdir(parents=True)
    if link:
        (package / "patches").write_text(link)
    monkeypatch.setattr(queues, "__file__", str(package / "patching/queue.py"))
    line = refused(lambda: apply(tree), tree)
    assert line.startswith(f"{package}/patches: must be a folder or a link to one (got {found}); ")
    assert "git clone -c core.symlinks=true" in line
