"""Apply, revert and status: all or nothing, idempotent, to the byte, whatever interrupts them.

Apply computes every new content before it writes anything, stores old and new contents beside the tree's files
(`state.py`), then moves the new ones into place one by one. Whatever stops it in between, the answer is the same as to
`revert`: put every stored pristine file back. So there is one way forward and one way back, and no third.
"""

from dataclasses import dataclass
from pathlib import Path

from . import state as states
from .queue import Queue, check_contents, find_fits, find_root, load_queue, read_digest, read_hashes
from .state import STORE, Condition, Digests, State, Survey, locate_copy, read_pristine, survey
from .tree import ABSENT, PatchError, Tree, digest, find_tree, remove_file, replace_file


@dataclass(frozen=True)
class Change:
    """What apply does to a tree: every file's content before (of those the release has) and after."""

    found: Survey
    queue: Queue
    pristine: dict[str, bytes]
    patched: dict[str, bytes]


def apply(target: Path | None = None, root: Path | None = None) -> str:
    """Patch the tree at `target` (default: the installed sglang) with the queue in `root` (default: ours), from its
    stored pristine files where another version has. Returns one line of what it did. Raises PatchError, with nothing
    changed, and OSError where the disk refuses, with the tree unpatched.
    """
    tree, root = find_tree(target), root or find_root()
    wanted = read_digest(root, tree.release)
    nothing = f"{_name(tree)}: already patched, nothing to do"
    if _is_patched(_survey(tree), wanted):
        return nothing  # without the lock, which a read-only tree cannot give
    with tree.lock():
        change = _compute(tree, root)
        if _is_patched(change.found, wanted):
            return nothing
        names = tuple(patch.name for patch in change.queue.patches)
        # Added files first, so that a half patched tree can be imported: hunks import them.
        paths = sorted(change.patched, key=lambda path: path in change.pristine)
        before = {path: digest(change.pristine[path]) if path in change.pristine else ABSENT for path in paths}
        files = {path: Digests(before[path], digest(change.patched[path])) for path in paths}
        _restore(tree, change.found.state)
        _replace(tree, State(tree.release, wanted, names, files), change)
    return f"{_name(tree)}: {len(names)} patches applied to {len(files)} files"


def preview(target: Path | None = None, root: Path | None = None) -> str:
    """What `apply` would do, a line for each hunk; changes nothing. Raises PatchError where `apply` would refuse."""
    tree, root = find_tree(target), root or find_root()
    change = _compute(tree, root)
    if _is_patched(change.found, read_digest(root, tree.release)):
        return f"{_name(tree)}: already patched, nothing to do"
    tree.check_writable()
    title = f"{len(change.queue.patches)} patches would be applied to {len(change.patched)} files"
    fits, _ = find_fits(change.queue.patches, change.pristine)
    return "\n  ".join([f"{_name(tree)}: {title}; nothing was changed", *map(str, fits)])


def revert(target: Path | None = None) -> str:
    """Give every patched file its own content back; needs no queue. Returns one line of what it did. Raises PatchError,
    with nothing changed, where a file was edited since, and OSError where the disk refuses; the next run goes on.
    """
    tree = find_tree(target)
    if not (tree.root / STORE).exists():
        return f"{_name(tree)}: not patched, nothing to do"
    with tree.lock():
        found = _survey(tree)
        _restore(tree, found.state)
    return f"{_name(tree)}: {len(found.state.files) if found.state else 0} files reverted"


def _compute(tree: Tree, root: Path) -> Change:
    found, queue = _survey(tree), load_queue(root, tree.release)
    pristine = states.read_pristine(tree, found.state, queue.hashes)
    return Change(found, queue, pristine, queue.patch(pristine))


def _survey(tree: Tree) -> Survey:
    found = states.survey(tree)
    if found.condition is Condition.EDITED:
        assert found.state is not None
        path = found.edited[0]
        remedy = "remove it" if found.state.files[path].pristine == ABSENT else f"reinstall sglang=={tree.release}"
        raise PatchError(f"{path}: edited after it was patched; undo the edit, or {remedy}")
    return found


def _is_patched(found: Survey, wanted: str) -> bool:
    return found.condition is Condition.PATCHED and found.state is not None and found.state.queue == wanted


def _replace(tree: Tree, state: State, change: Change) -> None:
    try:
        states.store(tree, "pristine", change.pristine)
        states.store(tree, "patched", change.patched)
        states.write(tree, state)
        for path in state.files:
            replace_file(locate_copy(tree, path, "patched"), tree.root / path)
    except BaseException:  # Ctrl-C too
        _restore(tree, state)
        raise


def _restore(tree: Tree, state: State | None) -> None:
    """Back to pristine from anywhere, added files last; safe to be killed and run again."""
    for path, known in reversed([*state.files.items()] if state else []):
        if tree.digest(path) == known.pristine:
            continue
        if known.pristine == ABSENT:
            remove_file(tree.root / path)
        else:
            states.read_pristine(tree, state, [path])  # refuses a damaged copy
            replace_file(locate_copy(tree, path, "pristine"), tree.root / path)
    states.clear(tree)


def _name(tree: Tree) -> str:
    return f"SGLang {tree.release} in {tree.root}"


def check_patched(target: Path | None = None, root: Path | None = None) -> None:
    """Check the tree that a server starts from. Raises PatchError, one line with what helps, if not wholly patched."""
    tree, root = find_tree(target), root or find_root()
    wanted, found = read_digest(root, tree.release), survey(tree)
    if found.condition is Condition.EDITED:
        condition = ":"  # the advice says the rest
    elif found.condition is not Condition.PATCHED or found.state is None:
        condition = f" is {found.condition.value};"
    elif found.state.queue != wanted:
        queues = f"({found.state.queue[:12]}, this one is {wanted[:12]})"
        condition = f" was patched by another version of the queue {queues};"
    else:
        return
    raise PatchError(f"SGLang {tree.release} in {tree.root}{condition} {_advise(tree, root)}")


def _advise(tree: Tree, root: Path) -> str:
    """`patch apply`, or why that would refuse."""
    try:
        preview(tree.root, root)
    except PatchError as error:
        return str(error)
    except ImportError as error:
        return f"{error}; pip install it, then run `sglang-xshare patch apply --target {tree.root}`"
    return f"run `sglang-xshare patch apply --target {tree.root}`"


def describe(target: Path | None = None, root: Path | None = None) -> str:
    """Lines about a tree that is wholly patched with this queue, or pristine. Raises PatchError for any other."""
    tree, root = find_tree(target), root or find_root()
    wanted, found = read_digest(root, tree.release), survey(tree)
    title = f"SGLang {tree.release} in {tree.root}: {found.condition.value}"
    if found.condition is Condition.PRISTINE:
        hashes = read_hashes(root, tree.release)
        check_contents(tree.release, hashes, read_pristine(tree, found.state, hashes))
        left = [*(found.state.files if found.state else ()), *[STORE] * (tree.root / STORE).exists()]
        return title + (f", but an earlier run left {', '.join(left)}; apply or revert removes it" if left else "")
    check_patched(target, root)
    assert found.state is not None
    return "\n  ".join([f"{title}, {len(found.state.files)} files, queue {wanted[:12]}", *found.state.patches])
