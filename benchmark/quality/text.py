"""Held-out text as sequences of equal length, and the places of answers to arithmetic problems."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Encoding, Tokenizer

ANSWER = re.compile(r"(?<=A:) -?\d+\n")


@dataclass(frozen=True)
class Answer:
    """The place of an answer: tokens [start, stop) of sequence `row`, after the whole problem."""

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

    def take(self, rows: Sequence[int]) -> "Sequences":
        """Return these sequences, in this order."""
        place = {row: new for new, row in enumerate(rows)}
        answers = [Answer(place[one.row], one.start, one.stop) for one in self.answers if one.row in place]
        return Sequences(self.tokens[list(rows)], tuple(self.domains[row] for row in rows), tuple(answers))

    def mix(self) -> "Sequences":
        """Return the same sequences in an order in which the domains take turns, so every batch holds all of them."""
        return self.take(mix_domains(self.domains))


def mix_domains(domains: Sequence[str]) -> list[int]:
    """Return an order in which these domains, with equally many sequences each, take turns."""
    names = sorted(set(domains))
    rows = [[row for row, domain in enumerate(domains) if domain == name] for name in names]
    return [row for turn in zip(*rows, strict=True) for row in turn]


def list_texts(folder: Path) -> list[Path]:
    """Return the `*.txt` of a folder, a domain each. Raises ValueError without one."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise ValueError(f"texts must be a folder of held-out *.txt files (got {folder})")
    return files


def cut_text(path: Path, ids: Sequence[int], length: int, count: int, skip: int = 0) -> list[list[int]]:
    """Return `count` sequences of `length` tokens after the first `skip`. Raises ValueError for too short a text."""
    if len(ids) < (skip + count) * length:
        room = f"(got {len(ids) // length})"
        raise ValueError(f"{path} must have {skip + count} sequences of {length} tokens {room}")
    return [list(ids[start : start + length]) for start in range(skip * length, (skip + count) * length, length)]


def load_sequences(texts: Path, tokenizer: Path, length: int, per_domain: int, skip: int = 0) -> Sequences:
    """Return `per_domain` sequences of every `*.txt`, a domain, after the first `skip`. Raises as `cut_text` does."""
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
    """Return the answers within one of `count` sequences, which are rows from `first` on, after `skip` others."""
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
