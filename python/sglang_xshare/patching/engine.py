"""Apply, revert and status: all or nothing, idempotent, to the byte, whatever interrupts them.

Apply computes every new content before it writes anything, stores old and new contents beside the tree's files
(`state.py`), then moves the new ones into place one by one. Whatever stops it in between, the answer is the same as to
`revert`: put every stored pristine file back. So there is one way forward and one way back, and no third.
"""

from collections.abc import Mapping
from pathlib import Path

from . import state as states
from .queue import check_contents, find_root, load_queue, read_digest, read_hashes
from .state import STORE, Condition, Digests, State, locate_copy, read_pristine, survey
from .tree import ABSENT, PatchError, Tree, digest, find_tree, remove_file, replace_file


def apply(target: Path | None = None, root: Path | None = None) -> str:
    """Patch the tree at `target` (default: the installed sglang) with the queue in `root` (default: ours), from its
    stored pristine files where another version has. Returns one line of what it did. Raises PatchError, with nothing
    changed, and OSError where the disk refuses, with the tree unpatched.
    """
    tree, root = find_tree(target), root or find_root()
    wanted = read_digest(root, tree.release)
    nothing = f"{tree}: already patched, nothing to do"
    if _is_patched(*survey(tree), wanted):
        return nothing  # without the lock, which a read-only tree cannot give
    with tree.lock():
        condition, former = survey(tree)
        if _is_patched(condition, former, wanted):
            return nothing
        queue = load_queue(root, tree.release)
        pristine = read_pristine(tree, former, queue.hashes)
        patched = queue.patch(pristine)
        names = tuple(patch.name for patch in queue.patches)
        # Added files first, so that a half patched tree can be imported: hunks import them.
        paths = sorted(patched, key=lambda path: path in pristine)
        files = {path: Digests(queue.hashes[path], digest(patched[path])) for path in paths}
        _restore(tree, former)
        _replace(tree, State(tree.release, wanted, names, files), pristine, patched)
    return f"{tree}: {len(names)} patches applied to {len(files)} files"


def revert(target: Path | None = None) -> str:
    """Give every patched file its own content back; needs no queue. Returns one line of what it did. Raises PatchError,
    with nothing changed, where a file was edited since, and OSError where the disk refuses; the next run goes on.
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
    """Back to pristine from anywhere, added files last; safe to be killed and run again."""
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
    """Check the tree that a server starts from. Raises PatchError, one line with the remedy, for a tree that is not
    wholly patched or that this user may not read.
    """
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
    """Lines about a tree that is wholly patched with this queue, or pristine, so that apply patches it. Raises
    PatchError for any other.
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
