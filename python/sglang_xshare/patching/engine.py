"""Apply and revert: all or nothing, idempotent, to the byte, whatever interrupts them.

Apply computes every new content before it writes anything, stores old and new contents beside the tree's files
(`state.py`), then moves the new ones into place one by one. Whatever stops it in between, the answer is the same as to
`revert`: put every stored pristine file back. So there is one way forward and one way back, and no third.
"""

from dataclasses import dataclass
from pathlib import Path

from sglang_xshare.patching import state as states
from sglang_xshare.patching.errors import PatchError
from sglang_xshare.patching.queue import find_root, load_queue, read_digest
from sglang_xshare.patching.state import STORE, Condition, Digests, State, Survey
from sglang_xshare.patching.tree import Tree, digest, find_tree, replace_file


@dataclass(frozen=True)
class Outcome:
    """What a run did: whether it changed the tree, and one line about it."""

    changed: bool
    line: str


def apply(target: Path | None = None, root: Path | None = None) -> Outcome:
    """Patch the tree at `target` (default: the installed sglang) with the queue in `root` (default: ours).

    A tree patched by another version of the queue is patched anew from its stored pristine files.

    Raises:
        PatchError: refused, nothing changed.
        OSError: the disk refused; the tree is unpatched.
    """
    tree = find_tree(target)
    root = root or find_root()
    wanted = read_digest(root, tree.release)
    nothing = Outcome(False, f"{_name(tree)}: already patched, nothing to do")
    if _is_patched(_survey(tree), wanted):
        return nothing  # without the lock, which a read-only tree cannot give
    with tree.lock():
        found = _survey(tree)
        if _is_patched(found, wanted):
            return nothing
        queue = load_queue(root, tree.release)
        pristine = {path: states.read_pristine(tree, found.state, path) for path in queue.hashes}
        patched = queue.patch(pristine)
        names = tuple(patch.name for patch in queue.patches)
        files = {path: Digests(digest(pristine[path]), digest(patched[path])) for path in patched}
        _restore(tree, found.state)
        _replace(tree, State(tree.release, wanted, names, files), pristine, patched)
    return Outcome(True, f"{_name(tree)}: {len(queue.patches)} patches applied to {len(files)} files")


def revert(target: Path | None = None) -> Outcome:
    """Give every patched file its own content back; needs no queue.

    Raises:
        PatchError: a file was edited after it was patched; nothing changed.
        OSError: the disk refused; the next run goes on.
    """
    tree = find_tree(target)
    if not (tree.root / STORE).exists():
        return Outcome(False, f"{_name(tree)}: not patched, nothing to do")
    with tree.lock():
        found = _survey(tree)
        _restore(tree, found.state)
    return Outcome(True, f"{_name(tree)}: {len(found.state.files) if found.state else 0} files reverted")


def _survey(tree: Tree) -> Survey:
    found = states.survey(tree)
    if found.condition is Condition.EDITED:
        raise PatchError(
            f"{found.edited[0]}: edited after it was patched; undo the edit, or reinstall sglang=={tree.release}"
        )
    return found


def _is_patched(found: Survey, wanted: str) -> bool:
    return found.condition is Condition.PATCHED and found.state is not None and found.state.queue == wanted


def _replace(tree: Tree, state: State, pristine: dict[str, bytes], patched: dict[str, bytes]) -> None:
    try:
        states.store(tree, "pristine", pristine)
        states.store(tree, "patched", patched)
        states.write(tree, state)
        for path in patched:
            replace_file(tree.root / STORE / "patched" / path, tree.root / path)
    except BaseException:  # Ctrl-C too
        _restore(tree, state)
        raise


def _restore(tree: Tree, state: State | None) -> None:
    """Back to pristine from anywhere; safe to be killed and run again."""
    if state is not None:
        for path, known in state.files.items():
            if tree.digest(path) != known.pristine:
                states.read_pristine(tree, state, path)  # refuses a damaged copy
                replace_file(tree.root / STORE / "pristine" / path, tree.root / path)
    states.clear(tree)


def _name(tree: Tree) -> str:
    return f"SGLang {tree.release} in {tree.root}"
