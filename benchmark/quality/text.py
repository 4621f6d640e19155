"""Held-out text, cut into sequences of equal length."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Encoding, Tokenizer

ANSWER = re.compile(r"(?<=A:) -?\d+\n")


@dataclass(frozen=True)
class Answer:
    """The position of an answer to an arithmetic problem: tokens [start, stop) of sequence `row`."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True)
class Sequences:
    """Sequences of equal length.

    `tokens` is [sequences, length] int64. `domains` contains the domain of each sequence. `answers` contains the
    positions of arithmetic answers.
    """

    tokens: torch.Tensor
    domains: tuple[str, ...]
    answers: tuple[Answer, ...] = ()

    def __len__(self) -> int:
        return len(self.domains)

    def take(self, rows: Sequence[int]) -> "Sequences":
        """Return only the sequences in `rows`, in this order."""
        place = {row: new for new, row in enumerate(rows)}
        answers = [Answer(place[one.row], one.start, one.stop) for one in self.answers if one.row in place]
        return Sequences(self.tokens[list(rows)], tuple(self.domains[row] for row in rows), tuple(answers))

    def mix(self) -> "Sequences":
        """Return the same sequences in another order. The domains alternate, so every batch contains all domains."""
        return self.take(mix_domains(self.domains))


def mix_domains(domains: Sequence[str]) -> list[int]:
    """Return an order of the sequences in which the domains alternate.

    `domains` contains the domain of each sequence. All domains must have the same number of sequences.
    """
    names = sorted(set(domains))
    rows = [[row for row, domain in enumerate(domains) if domain == name] for name in names]
    return [row for turn in zip(*rows, strict=True) for row in turn]


def list_texts(folder: Path) -> list[Path]:
    """Return the `*.txt` files of a folder, one for each domain. Raises ValueError if there are none."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise ValueError(f"texts must be a folder of held-out *.txt files (got {folder})")
    return files


def cut_text(path: Path, ids: Sequence[int], length: int, count: int, skip: int = 0) -> list[list[int]]:
    """Cut a text into `count` sequences of `length` tokens, after skipping `skip` sequences.

    Raises ValueError if the text is too short.
    """
    if len(ids) < (skip + count) * length:
        room = f"(got {len(ids) // length})"
        raise ValueError(f"{path} must have {skip + count} sequences of {length} tokens {room}")
    return [list(ids[start : start + length]) for start in range(skip * length, (skip + count) * length, length)]


def load_sequences(texts: Path, tokenizer: Path, length: int, per_domain: int, skip: int = 0) -> Sequences:
    """Load `per_domain` sequences from every `*.txt` file in a folder.

    The first `skip` sequences of each file are skipped. Raises ValueError if a text is too short.
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
    """Return the answers that lie completely in one of the file's sequences.

    The file has `count` sequences after `skip` skipped ones. `first` is the row of its first sequence.
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
