"""Apply and revert: known releases and hashes only, all or nothing, idempotent, reversible to the byte."""

import json
import os
import py_compile
import threading
import time
from pathlib import Path

import pytest

from patching.fake import FILES, LATER_PATCHED, LATER_QUEUE, PATCHED, QUEUE, RELEASE, ROUTE, write_queue, write_tree
from patching.runs import read_modes, read_tree, refused
from sglang_xshare.patching import PatchError, apply, check_patched, revert
from sglang_xshare.patching import queue as queues
from sglang_xshare.patching.engine import describe
from sglang_xshare.patching.state import STORE


def test_apply_changes_what_the_queue_says_and_revert_leaves_nothing_of_it(tree, queue):
    modes = read_modes(tree)
    outcome = apply(tree, queue)
    assert outcome == f"SGLang {RELEASE} in {tree}: 3 patches applied to 4 files"
    assert read_tree(tree) == PATCHED
    new = {"sglang/srt/ours.py": 0o100644}  # as its folder, but not executable
    assert {path: mode for path, mode in read_modes(tree).items() if ".xshare" not in path} == modes | new
    stored = {str(file.relative_to(tree / STORE)) for file in (tree / STORE).rglob("*") if file.is_file()}
    changed = {path for path in FILES if FILES[path] != PATCHED[path]}
    assert stored == {"state.json"} | {f"{path}.pristine" for path in changed}
    # Nothing that walks the package finds the copies.
    assert {str(file.relative_to(tree)) for file in tree.rglob("*.py")} == set(PATCHED)
    assert revert(tree) == f"SGLang {RELEASE} in {tree}: 4 files reverted"
    assert read_tree(tree) == FILES
    assert read_modes(tree) == modes


def test_an_added_file_that_is_gone_is_missed_and_put_back(tree, queue):
    apply(tree, queue)
    (tree / "sglang/srt/ours.py").unlink()
    with pytest.raises(PatchError, match="half"):
        check_patched(tree, queue)
    apply(tree, queue)
    assert read_tree(tree) == PATCHED


def test_a_queue_that_adds_files_and_a_later_one_that_lacks_one(tree, queue, tmp_path):
    only = write_queue(tmp_path / "only", {"shared/new.patch": QUEUE["shared/new.patch"]})
    apply(tree, only)
    check_patched(tree, only)
    assert "nothing to do" in apply(tree, only)
    apply(tree, queue)
    compiled = Path(str(py_compile.compile(str(tree / "sglang/srt/ours.py"), doraise=True)))
    apply(tree, write_queue(tmp_path / "later", {"shared/route.patch": ROUTE}))
    assert not (tree / "sglang/srt/ours.py").exists()
    assert not compiled.exists()
    (tree / "sglang/srt/route.py").chmod(0o600)
    revert(tree)
    assert (tree / "sglang/srt/route.py").stat().st_mode & 0o777 == 0o600, "a mode changed by the user stays"
    assert read_tree(tree) == FILES


def test_an_added_file_is_neither_replaced_nor_removed_if_it_is_the_users(tree, queue):
    added = tree / "sglang/srt/ours.py"
    added.write_text("mine = 1\n")
    assert refused(lambda: apply(tree, queue), tree).startswith("sglang/srt/ours.py: must be absent, because SGLang ")
    added.unlink()
    apply(tree, queue)
    added.write_text("mine = 1\n")
    for run in (lambda: revert(tree), lambda: apply(tree, queue)):
        assert refused(run, tree) == f"{added}: edited after it was patched; undo the edit, or remove it"
    added.unlink()
    revert(tree)
    assert read_tree(tree) == FILES


def test_stale_bytecode_never_passes_for_a_new_content(tree, queue):
    """Python compares whole seconds of mtime (and the size): every content a file ever had gets another second."""
    file = tree / "sglang/srt/route.py"
    stamps = [int(file.stat().st_mtime)]
    for step in (lambda: apply(tree, queue), lambda: revert(tree), lambda: apply(tree, queue), lambda: revert(tree)):
        py_compile.compile(str(file))
        step()
        stamps.append(int(file.stat().st_mtime))
    assert len(set(stamps)) == len(stamps)


def test_a_hard_linked_copy_is_not_changed(tree, queue, tmp_path):
    """Installers link files from their cache: patching must not write through to it."""
    os.link(tree / "sglang/srt/route.py", tmp_path / "cache.py")
    apply(tree, queue)
    assert (tmp_path / "cache.py").read_bytes() == FILES["sglang/srt/route.py"]


def test_another_version_of_the_queue_is_replaced(tree, queue, tmp_path):
    """From the stored pristine files, also those that the new version leaves alone; a bad one changes nothing."""
    apply(tree, queue)
    later = write_queue(tmp_path / "later", LATER_QUEUE)
    with pytest.raises(PatchError, match=r"another version of the queue \(\w{12}, this one is \w{12}\)"):
        check_patched(tree, later)
    bad = write_queue(tmp_path / "bad", {"p.patch": ROUTE.replace("import torch", "import jax")})
    assert "matches 0 places" in refused(lambda: apply(tree, bad), tree)
    assert "nothing to do" not in apply(tree, later)
    assert read_tree(tree) == LATER_PATCHED
    check_patched(tree, later)
    same_names = write_queue(tmp_path / "same", LATER_QUEUE | {"shared/new.patch": QUEUE["shared/new.patch"]})
    with pytest.raises(PatchError, match="another version of the queue"):
        check_patched(tree, same_names)
    revert(tree)
    assert read_tree(tree) == FILES
    assert not (tree / STORE).exists()


@pytest.mark.parametrize("version", [RELEASE, "0.5.23"])
def test_a_reinstalled_tree_counts_as_pristine(tree, queue, version):
    """pip replaces the files and leaves our directory: nothing of the old release may come back from it."""
    apply(tree, queue)
    files = {path: content.replace(b"0.5.21", version.encode()) for path, content in FILES.items()}
    if version != RELEASE:
        files["sglang/srt/route.py"] = b"import jax\n"
    write_tree(tree, files)
    with pytest.raises(PatchError, match="is not patched"):
        check_patched(tree, write_queue(queue, release=version))
    assert (tree / "sglang/srt/ours.py").exists()  # pip does not know it
    if version == RELEASE:
        left = "an earlier run left sglang/srt/ours.py, sglang/.xshare; apply or revert removes it"
        assert describe(tree, queue).endswith(f"not patched, but {left}")
    assert "nothing to do" not in revert(tree)
    assert read_tree(tree) == files
    assert not (tree / STORE).exists()


def test_a_tree_with_a_new_name_is_still_patched(tree, queue):
    """As a source tree's version changes with every commit: revert must not lose what it could restore."""
    apply(tree, queue)
    named = [path for path, content in FILES.items() if RELEASE.encode() in content]
    for path in named:
        (tree / path).write_bytes((tree / path).read_bytes().replace(RELEASE.encode(), b"0.5.22"))
    assert revert(tree).endswith("4 files reverted")
    assert read_tree(tree) == FILES | {path: (tree / path).read_bytes() for path in named}


def test_two_runs_at_once_patch_once(tree, queue, capsys):
    """The second waits for the lock and then finds nothing left to do."""
    import fcntl

    outcomes = []
    with open(tree / "sglang/__init__.py", "rb+") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        threads = [threading.Thread(target=lambda: outcomes.append(apply(tree, queue))) for _ in range(4)]
        for thread in threads:
            thread.start()
        said = ""
        while said.count(f"waiting for another patch run on {tree}") < len(threads):
            said += capsys.readouterr().err
            time.sleep(0.01)
        assert outcomes == []
        assert read_tree(tree) == FILES
    for thread in threads:
        thread.join()
    assert sorted("nothing to do" not in line for line in outcomes) == [False, False, False, True]
    assert read_tree(tree) == PATCHED
    assert capsys.readouterr().err == ""


def test_status(tree, queue):
    assert describe(tree, queue) == f"SGLang {RELEASE} in {tree}: not patched"
    with pytest.raises(PatchError, match=f"is not patched; run `sglang-xshare patch apply --target {tree}`$"):
        check_patched(tree, queue)
    with pytest.raises(PatchError, match=r"--target '.*/of two words'`$"):
        check_patched(write_tree(tree.parent / "of two words"), queue)
    apply(tree, queue)
    check_patched(tree, queue)
    title, *patches = describe(tree, queue).splitlines()
    state = json.loads((tree / STORE / "state.json").read_text())
    assert title == f"SGLang {RELEASE} in {tree}: patched, 4 files, queue {state['queue'][:12]}"
    assert [name.strip() for name in patches] == list(QUEUE)
    revert(tree)
    (tree / STORE).mkdir()
    assert describe(tree, queue).endswith("an earlier run left sglang/.xshare; apply or revert removes it")
    (tree / "sglang/srt/dos.py").write_bytes(b"")
    with pytest.raises(PatchError, match=r"sglang/srt/dos\.py: sha256"):
        describe(tree, queue)


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
        remedy = f"undo the edit, or reinstall sglang=={RELEASE}"
        assert refused(run, tree) == f"{tree}/sglang/srt/route.py: edited after it was patched; {remedy}"
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
    assert "must be a state file of this program" in refused(lambda: revert(tree), tree)


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
