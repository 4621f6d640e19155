"""The state of a patched tree, in the directory `sglang/.xshare/`.

    state.json               release, queue, and the hashes of every changed or added file before and after
    sglang/….py.pristine     the release's own content of every changed file
    sglang/….py.patched      new content of a file, until it is moved into place

None of these names ends in `.py`, because code that lists the package's modules must not find these copies.

The directory is written before the first file changes, and removed after the last file is restored. If a run is killed,
every file has one of two known contents, and the pristine content can be restored without a queue.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from .tree import ABSENT, PatchError, Tree, digest, make_folder, sync_directory, write_file

STORE = "sglang/.xshare"


@dataclass(frozen=True)
class Digests:
    """The sha256 of one file before and after the patches, in hex.

    `pristine` is `ABSENT` for a file that a patch adds.
    """

    pristine: str
    patched: str


@dataclass(frozen=True)
class State:
    """The queue that has patched a tree. All fields are empty if no queue has patched the tree.

    `files` contains the hashes of each file, by its path relative to site-packages. Added files come first.
    """

    release: str = ""
    queue: str = ""
    patches: tuple[str, ...] = ()
    files: dict[str, Digests] = field(default_factory=dict)


class Condition(Enum):
    """The condition of a tree."""

    PRISTINE = "not patched"
    PATCHED = "patched"
    INTERRUPTED = "half patched by an interrupted run"


def read(tree: Tree) -> State:
    """Return the state of a tree. Raises PatchError if the state file is not from this program."""
    file = tree.root / STORE / "state.json"
    if not file.exists():
        return State()
    try:
        record = json.loads(file.read_text())
        files = {path: Digests(**digests) for path, digests in record.pop("files").items()}
        return State(**{**record, "patches": tuple(record["patches"]), "files": files})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        advice = f"remove {file.parent} and reinstall sglang"
        raise PatchError(f"{file}: must be a state file of this program ({error}); {advice}") from error


def survey(tree: Tree) -> tuple[Condition, State]:
    """Compare the tree's files with its state.

    Return the tree's condition and the state from which the files can be restored. If pip has replaced the files, the
    tree is pristine. Its state then contains only the added files, because pip does not remove them. A new release name
    alone does not show this, because the name of a source tree can change while its files stay the same. Raises
    PatchError if a file was edited after it was patched.
    """
    state = read(tree)
    found = {path: tree.digest(path) for path in state.files}
    patched = {path for path, known in state.files.items() if found[path] == known.patched}
    own = {path for path, known in state.files.items() if known.pristine != ABSENT}
    edited = [path for path, known in state.files.items() if found[path] not in (known.pristine, known.patched)]
    replaced = own and not own & patched
    if not found or (replaced and (state.release != tree.release or not edited)):
        left = {path: state.files[path] for path in state.files if path in patched}
        return Condition.PRISTINE, dataclasses.replace(state, files=left)
    if edited:
        remedy = f"reinstall sglang=={tree.release}" if edited[0] in own else "remove it"
        raise PatchError(f"{tree.root / edited[0]}: edited after it was patched; undo the edit, or {remedy}")
    return Condition.PATCHED if len(patched) == len(found) else Condition.INTERRUPTED, state


def read_pristine(tree: Tree, state: State, paths: Iterable[str]) -> dict[str, bytes]:
    """Return the release's own content of each file, whether the file is patched or not.

    Raises PatchError if a stored copy is damaged.
    """
    contents = {}
    for path in paths:
        found = tree.digest(path)
        wanted = state.files[path].pristine if path in state.files else found
        if wanted == ABSENT:
            continue
        copy = locate_copy(tree, path, "pristine")
        contents[path] = tree.read(path) if found == wanted else copy.read_bytes()
        if digest(contents[path]) != wanted:
            raise PatchError(f"{copy}: damaged copy, sha256 is not {wanted}; reinstall sglang")
    return contents


def locate_copy(tree: Tree, path: str, kind: str) -> Path:
    """Return the path of the stored copy of a file. `kind` is "pristine" or "patched"."""
    return tree.root / STORE / f"{path}.{kind}"


def write(tree: Tree, state: State) -> None:
    """Replace the state file in one step."""
    store = tree.root / STORE
    like = (tree.root / "sglang").stat()
    write_file(store / "state.json.new", json.dumps(dataclasses.asdict(state), indent=1).encode(), like)
    os.replace(store / "state.json.new", store / "state.json")
    sync_directory(store)


def store(tree: Tree, kind: str, contents: Mapping[str, bytes]) -> None:
    """Store copies of files on disk. `kind` is "pristine" or "patched".

    The copies get the modes of the tree's folders, because a server of another user must be able to read them.
    """
    like = (tree.root / "sglang").stat()
    for path, content in contents.items():
        copy = locate_copy(tree, path, kind)
        for folder in reversed(copy.relative_to(tree.root / STORE).parents):
            make_folder(tree.root / STORE / folder, like)
        write_file(copy, content, like)
    for directory, _, _ in os.walk(tree.root / STORE):
        sync_directory(Path(directory))
    sync_directory(tree.root / "sglang")


def clear(tree: Tree) -> None:
    """Remove the store. The state file is removed first, because copies without a state file are ignored."""
    store = tree.root / STORE
    if store.exists():
        (store / "state.json").unlink(missing_ok=True)
        sync_directory(store)
        shutil.rmtree(store)
        sync_directory(store.parent)
