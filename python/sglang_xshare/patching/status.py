"""Say how a tree stands, to a user (`patch status`) and to a server that starts from it."""

from pathlib import Path

from sglang_xshare.patching.errors import PatchError
from sglang_xshare.patching.queue import check_content, find_root, read_digest, read_hashes
from sglang_xshare.patching.state import STORE, Condition, survey
from sglang_xshare.patching.tree import find_tree


def check_patched(target: Path | None = None, root: Path | None = None) -> None:
    """For a server's start: the tree it runs from (default: the installed sglang) is wholly patched with this queue.

    Raises:
        PatchError: it is not; one line that says how it stands and what to run.
    """
    tree = find_tree(target)
    wanted = read_digest(root or find_root(), tree.release)
    found = survey(tree)
    advice = f"run `sglang-xshare patch apply --target {tree.root}`"
    if found.state is None or found.condition is not Condition.PATCHED:
        condition = " ".join([found.condition.value, *found.edited])
        raise PatchError(f"SGLang {tree.release} in {tree.root} is {condition}; {advice}")
    if found.state.queue != wanted:
        raise PatchError(
            f"SGLang {tree.release} in {tree.root} was patched by another version of the queue "
            f"({found.state.queue[:12]}, this one is {wanted[:12]}); {advice}"
        )


def describe(target: Path | None = None, root: Path | None = None) -> str:
    """Lines about a tree that needs no attention: wholly patched with this queue, or pristine.

    Raises:
        PatchError: it needs attention; one line.
    """
    tree, root = find_tree(target), root or find_root()
    wanted, found = read_digest(root, tree.release), survey(tree)
    title = f"SGLang {tree.release} in {tree.root}: {found.condition.value}"
    if found.condition is Condition.PRISTINE:
        for path, pristine in read_hashes(root, tree.release).items():
            check_content(tree.release, path, tree.read(path), pristine)
        leftover = ", but an earlier run left sglang/.xshare; apply or revert removes it"
        return title + leftover * (tree.root / STORE).exists()
    check_patched(target, root)
    assert found.state is not None
    return "\n  ".join([f"{title}, {len(found.state.files)} files, queue {wanted[:12]}", *found.state.patches])
