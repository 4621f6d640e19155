"""The commands apply, revert and status.

Apply and revert change all files or none. If a run is interrupted, the next run completes or undoes its changes. Both
commands can be repeated, and revert restores every byte.

Apply computes every new content before it writes a file. It stores the old and new contents beside the tree's files
(`state.py`), then moves the new contents into place one by one. If a move fails, apply restores every stored pristine
file. If apply is killed, the next run restores them.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path

from . import state as states
from .queue import check_contents, find_root, load_queue, read_digest, read_hashes
from .state import STORE, Condition, Digests, State, locate_copy, read_pristine, survey
from .tree import ABSENT, PatchError, Tree, digest, find_tree, remove_file, replace_file


def apply(target: Path | None = None, root: Path | None = None) -> str:
    """Patch a tree. Return a line for the user.

    `target` is the directory of the tree, by default the installed sglang. `root` contains the patch queues, by default
    ours. If another version of the queue has patched the tree, the stored pristine files are patched again. Raises
    PatchError, and changes nothing, if the tree cannot be patched. Raises OSError, and leaves the tree unpatched, if
    the disk fails or is full.
    """
    tree, root = find_tree(target), root or find_root()
    wanted = read_digest(root, tree.release)
    nothing = f"{tree}: already patched, nothing to do"
    if _is_patched(*survey(tree), wanted):
        return nothing  # without the lock, which needs a writable tree
    with tree.lock():
        condition, former = survey(tree)
        if _is_patched(condition, former, wanted):
            return nothing
        queue = load_queue(root, tree.release)
        pristine = read_pristine(tree, former, queue.hashes)
        patched = queue.patch(pristine)
        names = tuple(patch.name for patch in queue.patches)
        # Added files come first, because hunks import them. So a half patched tree can be imported too.
        paths = sorted(patched, key=lambda path: path in pristine)
        files = {path: Digests(queue.hashes[path], digest(patched[path])) for path in paths}
        _restore(tree, former)
        _replace(tree, State(tree.release, wanted, names, files), pristine, patched)
    return f"{tree}: {len(names)} patches applied to {len(files)} files"


def revert(target: Path | None = None) -> str:
    """Restore the release's own content of every patched file. Return a line for the user.

    No patch queue is needed. Raises PatchError, and changes nothing, if a file was edited after it was patched. Raises
    OSError if the disk is full or fails. The next run then completes the revert.
    """
    tree = find_tree(target)
    if not (tree.root / STORE).exists():
        return f"{tree}: not patched, nothing to do"
    with tree.lock():
        _, state = survey(tree)
        _restore(tree, state)
    return f"{tree}: {len(state.files)} files reverted"


def _is_patched(condition: Condition, state: State, wanted: str) -> bool:
    return condition is Condition.PATCHED and state.queue == wanted


def _replace(tree: Tree, state: State, pristine: Mapping[str, bytes], patched: Mapping[str, bytes]) -> None:
    try:
        states.store(tree, "pristine", pristine)
        states.store(tree, "patched", patched)
        states.write(tree, state)
        for path in state.files:
            replace_file(locate_copy(tree, path, "patched"), tree.root / path)
    except BaseException:  # Ctrl-C too
        _restore(tree, state)
        raise


def _restore(tree: Tree, state: State) -> None:
    """Restore every file, whatever the tree's condition. Added files come last. A killed run can be repeated."""
    for path, known in reversed(state.files.items()):
        if tree.digest(path) == known.pristine:
            continue
        if known.pristine == ABSENT:
            remove_file(tree.root / path)
        else:
            read_pristine(tree, state, [path])  # refuses a damaged copy
            replace_file(locate_copy(tree, path, "pristine"), tree.root / path)
    states.clear(tree)


def check_patched(target: Path | None = None, root: Path | None = None) -> None:
    """Raise PatchError, with the remedy, if a server's tree is unreadable or is not completely patched."""
    tree, root = find_tree(target), root or find_root()
    try:
        wanted = read_digest(root, tree.release)
        condition, state = survey(tree)
    except PermissionError as error:
        raise PatchError(
            f"{error.filename}: {error.strerror}; a server's user must be able to read the tree: whoever owns it runs "
            "`sglang-xshare patch revert` and `sglang-xshare patch apply`, which gives its files the tree's modes"
        ) from None
    if _is_patched(condition, state, wanted):
        return
    found = condition.value
    if condition is Condition.PATCHED:
        found += f" by another version of the queue ({state.queue[:12]}, this one is {wanted[:12]})"
    raise PatchError(f"{tree} is {found}; run `sglang-xshare patch apply --target {shlex.quote(str(tree.root))}`")


def describe(target: Path | None = None, root: Path | None = None) -> str:
    """Return lines about the condition of a tree.

    Raises PatchError unless this queue has patched the tree, or the tree is unpatched and this queue fits it.
    """
    tree, root = find_tree(target), root or find_root()
    wanted = read_digest(root, tree.release)
    condition, state = survey(tree)
    title = f"{tree}: {condition.value}"
    if condition is Condition.PRISTINE:
        hashes = read_hashes(root, tree.release)
        check_contents(tree.release, hashes, read_pristine(tree, state, hashes))
        left = [*state.files, *[STORE] * (tree.root / STORE).exists()]
        return title + (f", but an earlier run left {', '.join(left)}; apply or revert removes it" if left else "")
    check_patched(target, root)
    return "\n  ".join([f"{title}, {len(state.files)} files, queue {wanted[:12]}", *state.patches])
