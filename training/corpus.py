"""The training text of the small checkpoints. Its four domains exist on every machine with Python.

Python source, C headers and English documentation come from the installation of the Python interpreter. System headers
and Perl's manual pages are added if they are installed. Arithmetic problems are generated. The held-out text is stored
in the repository, so it contains only generated problems and documents that ship with Python (PSF licence).
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
LONGEST_HELDOUT = 12_000  # so that a domain's held-out text is not a single long file
SHORTEST_HELDOUT = 400
LEAK_CHARS = 80  # shorter paragraphs can be equal by chance, such as an include guard, and do not count as copies
STDLIB = Path(sysconfig.get_path("stdlib"))
PYTHON_HEADERS = Path(sysconfig.get_path("include"))
SYSTEM_HEADERS = Path("/usr/include")
PERL_MANUAL = Path("/usr/share/perl")


@dataclass(frozen=True)
class Document:
    """One file, one topic or one block of problems. Only `shippable` documents can be held out."""

    name: str
    text: str
    shippable: bool = True


@dataclass(frozen=True)
class Split:
    """The documents of a domain. `dev` is used to tune the trigram model, and `heldout` only for measurements."""

    train: list[Document]
    dev: list[Document]
    heldout: list[Document]


def load_corpus() -> dict[str, Split]:
    """Collect the documents of all domains and split each domain.

    Paragraphs of dev and held-out text with LEAK_CHARS or more characters are removed from the training text. Raises
    FileNotFoundError if this machine has too little shippable text for a domain.
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
    """Return three values that identify a corpus: the numbers of documents and characters, and the text's sha256."""
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
    """Generate sums and differences of numbers below 100. Each document has 1 to 32 problems.

    One fortieth of the problems is held out, and another fortieth is dev text.
    """
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
        return  # the standard library contains a few files with other encodings


def _without_copies(documents: Iterable[Document]) -> list[Document]:
    return list({document.text: document for document in documents}.values())


def _split(documents: list[Document]) -> Split:
    """Split documents into held-out, dev and training text.

    Held-out and dev text contain only shippable documents of medium length. Shippable documents come first, and within
    each group the documents are sorted by the hash of their name. So the order looks random, but it is the same on all
    machines.
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
    """Yield all paragraphs with LEAK_CHARS or more characters.

    White space is normalized, because docstrings are indented in the Python domain but not in the English domain.
    """
    for paragraph in text.split("\n\n"):
        folded = " ".join(paragraph.split())
        if len(folded) >= LEAK_CHARS:
            yield folded


def _hash(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
