"""What a patched tree says about itself: `sglang/.xshare/`, there while the tree is patched or being changed.

    state.json               release, queue, and the hashes of every changed or added file before and after
    sglang/….py.pristine     the release's own content of every changed file
    sglang/….py.patched      new content on its way to its place

No name ends in `.py`: what walks the package's modules must not find the copies.

The directory is written before the first file changes and removed after the last is back, so whenever a run is killed
every file holds one of two known contents and the pristine one can be restored from here alone, without a queue.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from .tree import ABSENT, PatchError, Tree, digest, sync_directory, write_file

STORE = "sglang/.xshare"


@dataclass(frozen=True)
class Digests:
    """sha256 of one file, in hex, before and after the queue; `pristine` is `ABSENT` for a file that the queue adds."""

    pristine: str
    patched: str


@dataclass(frozen=True)
class State:
    """Which queue a tree was patched with; `files` is keyed by path relative to site-packages, added files first."""

    release: str
    queue: str
    patches: tuple[str, ...]
    files: Mapping[str, Digests]


class Condition(Enum):
    """How a tree stands."""

    PRISTINE = "not patched"
    PATCHED = "patched"
    INTERRUPTED = "half patched by an interrupted run"
    EDITED = "edited after it was patched"


@dataclass(frozen=True)
class Survey:
    """A tree's condition; `edited` files have neither content. `state` is what the files are restored by: of a pristine
    tree, only the added files that are still there.
    """

    condition: Condition
    state: State | None = None
    edited: tuple[str, ...] = ()


def read(tree: Tree) -> State | None:
    """The tree's state file, or None where there is none. Raises PatchError for one that is not ours."""
    file = tree.root / STORE / "state.json"
    if not file.exists():
        return None
    try:
        record = json.loads(file.read_text())
        files = {path: Digests(**digests) for path, digests in record.pop("files").items()}
        return State(**{**record, "patches": tuple(record["patches"]), "files": files})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        advice = f"remove {file.parent} and reinstall sglang"
        raise PatchError(f"{file}: not a state file of this program ({error}); {advice}") from error


def survey(tree: Tree) -> Survey:
    """Compare the files with the state. A tree whose files pip has replaced since is pristine; pip leaves the added
    files. The release's name alone does not say so: a source tree's changes while its files stay.
    """
    state = read(tree)
    if state is None:
        return Survey(Condition.PRISTINE)
    found = {path: tree.digest(path) for path in state.files}
    patched = {path for path, known in state.files.items() if found[path] == known.patched}
    own = {path for path, known in state.files.items() if known.pristine != ABSENT}
    edited = tuple(path for path, known in state.files.items() if found[path] not in (known.pristine, known.patched))
    replaced = own and not own & patched
    if replaced and (state.release != tree.release or not edited):
        left = {path: state.files[path] for path in state.files if path in patched}
        return Survey(Condition.PRISTINE, dataclasses.replace(state, files=left))
    if edited:
        return Survey(Condition.EDITED, state, edited)
    return Survey(Condition.PATCHED if len(patched) == len(found) else Condition.INTERRUPTED, state)


def read_pristine(tree: Tree, state: State | None, paths: Iterable[str]) -> dict[str, bytes]:
    """The release's own content of each file, patched now or not. Raises PatchError for a damaged stored copy."""
    contents = {}
    for path in paths:
        found = tree.digest(path)
        wanted = state.files[path].pristine if state is not None and path in state.files else found
        if wanted != ABSENT:
            contents[path] = tree.read(path) if found == wanted else _read_copy(tree, path, wanted)
    return contents


def locate_copy(tree: Tree, path: str, kind: str) -> Path:
    """The place of a file's copy, `kind` is "pristine" or "patched"."""
    return tree.root / STORE / f"{path}.{kind}"


def write(tree: Tree, state: State) -> None:
    """Replace the state file in one step."""
    store = tree.root / STORE
    write_file(store / "state.json.new", json.dumps(dataclasses.asdict(state), indent=1).encode())
    os.replace(store / "state.json.new", store / "state.json")
    sync_directory(store)


def store(tree: Tree, kind: str, contents: Mapping[str, bytes]) -> None:
    """Put copies of files on disk under `kind`, "pristine" or "patched"."""
    for path, content in contents.items():
        write_file(locate_copy(tree, path, kind), content)
    for directory, _, _ in os.walk(tree.root / STORE):
        sync_directory(Path(directory))
    sync_directory(tree.root / "sglang")


def clear(tree: Tree) -> None:
    """Remove the whole store, the state file first: without it the rest means nothing."""
    store = tree.root / STORE
    if store.exists():
        (store / "state.json").unlink(missing_ok=True)
        sync_directory(store)
        shutil.rmtree(store)
        sync_directory(store.parent)


def _read_copy(tree: Tree, path: str, wanted: str) -> bytes:
    file = locate_copy(tree, path, "pristine")
    content = file.read_bytes()
    if digest(content) != wanted:
        raise PatchError(f"{file}: damaged copy, sha256 is not {wanted}; reinstall sglang")
    return content
