"""Text for the small checkpoints: four domains found on any machine with Python, split without leaks.

Python source, C headers and English documentation come from the interpreter's own installation, plus system headers
and Perl's manual pages if they are installed; arithmetic is generated. Only documents that ship with Python (PSF
licence) or are generated are held out, so the held-out text can be stored in the repository.
"""

import ast
import hashlib
import random
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

DOMAINS = ("python", "c", "english", "arithmetic")
TRAIN_CHARS = 3_000_000
DEV_CHARS = 60_000
HELDOUT_CHARS = 32_000
LONGEST_HELDOUT = 12_000  # one long file must not be a domain's whole held-out text
SHORTEST_HELDOUT = 400
LEAK_CHARS = 80  # a shared paragraph of this length is a copy; a shorter one may be idiom, such as an include guard
STDLIB = Path(sysconfig.get_path("stdlib"))
PYTHON_HEADERS = Path(sysconfig.get_path("include"))
SYSTEM_HEADERS = Path("/usr/include")
PERL_MANUAL = Path("/usr/share/perl")


@dataclass(frozen=True)
class Document:
    """One file, topic or block of problems; `shippable` ones may be held out and stored in the repository."""

    name: str
    text: str
    shippable: bool = True


@dataclass(frozen=True)
class Split:
    """A domain's documents: `train`, `dev` (tunes the trigram model, never trained on), `heldout` (only measured)."""

    train: list[Document]
    dev: list[Document]
    heldout: list[Document]


def load_corpus() -> dict[str, Split]:
    """Split every domain of DOMAINS; no paragraph of LEAK_CHARS or more of any dev or held-out text is trained on.

    Raises FileNotFoundError with the domain of which this machine has too little shippable text.
    """
    splits = {}
    for domain, source in (("python", _python_files), ("c", _headers), ("english", _english)):
        documents = _without_copies(source())
        if sum(len(document.text) for document in documents if document.shippable) < 2 * (DEV_CHARS + HELDOUT_CHARS):
            raise FileNotFoundError(
                f"corpus: too little {domain} text under {STDLIB} and {PYTHON_HEADERS}; install Python's headers"
            )
        splits[domain] = _split(documents)
    splits["arithmetic"] = _arithmetic()
    unseen = {
        p for split in splits.values() for document in split.dev + split.heldout for p in _paragraphs(document.text)
    }
    return {domain: Split(_drop(split.train, unseen), split.dev, split.heldout) for domain, split in splits.items()}


def fingerprint(documents: Iterable[Document]) -> dict[str, object]:
    """Return the number of documents and characters and the sha256 of the text, which identify a machine's corpus."""
    texts = [document.text for document in documents]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return {"documents": len(texts), "characters": sum(map(len, texts)), "sha256": digest}


def _python_files() -> Iterator[Document]:
    for path in sorted(STDLIB.rglob("*.py")):
        inside = path.relative_to(STDLIB)
        if not {"site-packages", "test", "tests", "idle_test", "pydoc_data", "encodings"} & set(inside.parts):
            yield from _read(path, str(inside), shippable=True)


def _headers() -> Iterator[Document]:
    for root, shippable in ((PYTHON_HEADERS, True), (SYSTEM_HEADERS, False)):
        for path in sorted(root.rglob("*.h")):
            if shippable or not any("python" in part for part in path.parts):
                yield from _read(path, f"{root.name}/{path.relative_to(root)}", shippable)


def _english() -> Iterator[Document]:
    for name, text in sorted(topics.topics.items()):
        yield Document(f"topics/{name}", text)
    for path in sorted([*STDLIB.rglob("*.rst"), *STDLIB.rglob("idlelib/*.txt")]):
        if not {"site-packages", "test"} & set(path.parts):
            yield from _read(path, str(path.relative_to(STDLIB)), shippable=False)
    for path in sorted(PERL_MANUAL.rglob("*.pod")):
        yield from _read(path, str(path), shippable=False)
    for document in _python_files():
        docstrings = "\n\n".join(_docstrings(document.text))
        if len(docstrings) > SHORTEST_HELDOUT:
            yield Document(f"docstrings/{document.name}", docstrings, shippable=False)


def _docstrings(source: str) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old modules
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def _arithmetic() -> Split:
    """Return sums and differences of numbers below 100, one to 32 in a document; a fortieth is held out."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    problems = [f"Q: {a}+{b} A: {a + b}\n" for a, b in pairs]
    problems += [f"Q: {a}-{b} A: {a - b}\n" for a, b in pairs if a >= b]
    problems.sort(key=_hash)
    unseen = len(problems) // 40
    pools = {"heldout": problems[:unseen], "dev": problems[unseen : 2 * unseen], "train": problems[2 * unseen :]}
    room = {"heldout": HELDOUT_CHARS, "dev": DEV_CHARS, "train": TRAIN_CHARS}
    draw = random.Random(1)
    parts: dict[str, list[Document]] = {part: [] for part in pools}
    for part, documents in parts.items():
        while room[part] > 0:
            text = "".join(draw.choices(pools[part], k=draw.randint(1, 32)))
            documents.append(Document(f"arithmetic/{part}/{len(documents)}", text))
            room[part] -= len(text)
    return Split(**parts)


def _read(path: Path, name: str, shippable: bool) -> Iterator[Document]:
    try:
        yield Document(name, path.read_text(encoding="utf-8"), shippable)
    except UnicodeDecodeError:
        return  # the standard library keeps a few files in other encodings


def _without_copies(documents: Iterable[Document]) -> list[Document]:
    return list({document.text: document for document in documents}.values())


def _split(documents: list[Document]) -> Split:
    """Divide documents: held-out and dev text from documents of middle length, training text from Python's own first.

    The order is by the hash of the name: shuffled, and the same everywhere.
    """
    parts: dict[str, list[Document]] = {"heldout": [], "dev": [], "train": []}
    room = {"heldout": HELDOUT_CHARS, "dev": DEV_CHARS, "train": TRAIN_CHARS}
    for document in sorted(documents, key=lambda document: (not document.shippable, _hash(document.name))):
        length = len(document.text)
        may_hold_out = document.shippable and SHORTEST_HELDOUT <= length <= LONGEST_HELDOUT
        for part in ("heldout", "dev", "train") if may_hold_out else ("train",):
            if length <= room[part]:
                room[part] -= length
                parts[part].append(document)
                break
    return Split(**parts)


def _drop(documents: list[Document], unseen: set[str]) -> list[Document]:
    kept = []
    for document in documents:
        text = "\n\n".join(p for p in document.text.split("\n\n") if " ".join(p.split()) not in unseen)
        kept.append(Document(document.name, text, document.shippable))
    return [document for document in kept if document.text.strip()]


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs long enough to be copies, with white space folded: only one domain indents docstrings."""
    for paragraph in text.split("\n\n"):
        folded = " ".join(paragraph.split())
        if len(folded) >= LEAK_CHARS:
            yield folded


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
