"""Say how a tree stands, to a user (`patch status`) and to a server that starts from it."""

from pathlib import Path

from .engine import preview
from .errors import PatchError
from .queue import check_contents, find_root, read_digest, read_hashes
from .state import STORE, Condition, read_pristine, survey
from .tree import Tree, find_tree


def check_patched(target: Path | None = None, root: Path | None = None) -> None:
    """For a server's start: the tree it runs from (default: the installed sglang) is wholly patched with this queue.

    Raises PatchError where it is not: one line that says how it stands and what helps.
    """
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
    """Lines about a tree that needs no attention: wholly patched with this queue, or pristine. Raises PatchError,
    one line, for one that does.
    """
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
