"""Apply, revert and status: all files or none, idempotent, reversible to the byte, whatever interrupts a run.

Apply computes every new content before it writes a file, stores old and new contents beside the tree's files
(`state.py`), then moves the new contents into place one by one. If apply fails in between, it moves every stored
pristine file back; after a kill the next run does so.
"""

from collections.abc import Mapping
from pathlib import Path

from . import state as states
from .queue import check_contents, find_root, load_queue, read_digest, read_hashes
from .state import STORE, Condition, Digests, State, locate_copy, read_pristine, survey
from .tree import ABSENT, PatchError, Tree, digest, find_tree, remove_file, replace_file


def apply(target: Path | None = None, root: Path | None = None) -> str:
    """Patch the tree at `target` (default: the installed sglang) with the queue in `root` (default: ours).

    A tree that another version of the queue has patched is patched anew from the stored pristine files. Returns a line
    for the user. Raises PatchError, with nothing changed, and OSError for a full or failing disk, with the tree
    unpatched.
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
        # Added files first: hunks import them, so a half patched tree can be imported too.
        paths = sorted(patched, key=lambda path: path in pristine)
        files = {path: Digests(queue.hashes[path], digest(patched[path])) for path in paths}
        _restore(tree, former)
        _replace(tree, State(tree.release, wanted, names, files), pristine, patched)
    return f"{tree}: {len(names)} patches applied to {len(files)} files"


def revert(target: Path | None = None) -> str:
    """Restore the release's own content of every patched file, without a queue. Returns a line for the user.

    Raises PatchError, with nothing changed, for a file that was edited after it was patched, and OSError for a full or
    failing disk; the next run continues.
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
    """Restore every file from any condition, added files last; a killed run can be repeated."""
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
    """Raise PatchError, with the remedy, for a server's tree that is unreadable or not wholly patched."""
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
    raise PatchError(f"{tree} is {found}; run `sglang-xshare patch apply --target {tree.root}`")


def describe(target: Path | None = None, root: Path | None = None) -> str:
    """Return lines about a tree that this queue has patched or can patch. Raises PatchError for any other tree."""
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
