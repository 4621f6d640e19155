"""Held-out text as sequences of equal length, and where in them the answers to arithmetic problems lie."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Encoding, Tokenizer

ANSWER = re.compile(r"(?<=A:) -?\d+\n")


@dataclass(frozen=True)
class Answer:
    """Tokens [start, stop) of sequence `row` are the answer to a problem that stands in full before them."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True)
class Sequences:
    """Consecutive tokens, [sequences, length] int64; each sequence's domain, and arithmetic answers in them."""

    tokens: torch.Tensor
    domains: tuple[str, ...]
    answers: tuple[Answer, ...] = ()

    def __len__(self) -> int:
        return len(self.domains)

    def of_domain(self, domain: str) -> torch.Tensor:
        """[sequences] bool: those of one domain."""
        return torch.tensor([name == domain for name in self.domains])

    def take(self, rows: Sequence[int]) -> "Sequences":
        """These sequences, in this order."""
        place = {row: new for new, row in enumerate(rows)}
        answers = [Answer(place[one.row], one.start, one.stop) for one in self.answers if one.row in place]
        return Sequences(self.tokens[list(rows)], tuple(self.domains[row] for row in rows), tuple(answers))

    def mixing(self) -> list[int]:
        """An order in which the domains take turns, so that every batch holds all of them."""
        return mix_domains(self.domains)


def mix_domains(domains: Sequence[str]) -> list[int]:
    """An order of sequences of these domains in which they take turns; there are equally many of each."""
    names = sorted(set(domains))
    rows = [[row for row, domain in enumerate(domains) if domain == name] for name in names]
    return [row for turn in zip(*rows, strict=True) for row in turn]


def list_texts(folder: Path) -> list[Path]:
    """The `*.txt` of a folder, a domain each. Raises ValueError where there is none."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise ValueError(f"texts {folder}: no *.txt file there; needed is a folder of held-out texts")
    return files


def cut_text(path: Path, ids: Sequence[int], length: int, count: int, skip: int = 0) -> list[list[int]]:
    """Return the `count` sequences of `length` of a text's tokens after the first `skip` of them. Raises ValueError if
    the text is too short.
    """
    if len(ids) < (skip + count) * length:
        room = len(ids) // length
        raise ValueError(f"{path}: {room} sequences of {length} tokens in it; {skip + count} a domain are asked for")
    return [list(ids[start : start + length]) for start in range(skip * length, (skip + count) * length, length)]


def load_sequences(texts: Path, tokenizer: Path, length: int, per_domain: int, skip: int = 0) -> Sequences:
    """Return `per_domain` sequences of `length` tokens of every `*.txt`, a domain, after the first `skip` of them.
    Raises ValueError for a text that is too short.
    """
    files = list_texts(texts)
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    tokens: list[list[int]] = []
    answers: list[Answer] = []
    for path in files:
        text = path.read_text()
        encoding = encoder.encode(text, add_special_tokens=False)
        sequences = cut_text(path, encoding.ids, length, per_domain, skip)
        answers += _answers(text, encoding, length, len(tokens), per_domain, skip)
        tokens += sequences
    domains = tuple(path.stem for path in files for _ in range(per_domain))
    return Sequences(torch.tensor(tokens), domains, tuple(answers))


def _answers(text: str, encoding: Encoding, length: int, first: int, count: int, skip: int) -> list[Answer]:
    """Return the answers whose tokens lie within one of `count` sequences, which are rows from `first` on and come
    after `skip` others.
    """
    found = []
    for match in ANSWER.finditer(text):
        start = encoding.char_to_token(match.start())
        last = encoding.char_to_token(match.end() - 1)
        if start is None or last is None:
            continue
        row, column = divmod(start - skip * length, length)
        if 0 <= row < count and column + last - start < length:
            found.append(Answer(first + row, column, column + last - start + 1))
    return found
