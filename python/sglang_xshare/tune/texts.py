"""The user's texts, cut into samples of equal length: some to tune on, some to confirm with."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from ..files import read_text


@dataclass(frozen=True)
class Sample:
    """A prompt, and the tokens that follow it in the text."""

    prompt: list[int]
    text: list[int]


def read_samples(
    folder: Path,
    tokenize: Callable[[str], list[int]],
    prompt: int,
    tokens: int,
    samples: int,
    parts: int = 2,
    batch: int = 0,
) -> list[list[Sample]]:
    """So many parts of `samples` each, or as many as fill a `batch`, from the *.txt of a folder: every file gives each
    part equally many, sample after sample in turn, since a text's end may be unlike its beginning. Files take turns
    within a part, so that a batch mixes them. One token of each text is the prefill's. Raises ValueError where there
    are none, or too few: it names the flag that asks for more than there is.
    """
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise ValueError(f"--texts {folder}: no *.txt in it; allowed is a folder of plain texts")
    count = max(samples, batch)
    each, length = -(-count // len(files)), prompt + tokens + 1
    needed = parts * each
    by_file: list[list[Sample]] = []
    for file in files:
        # Some six characters a token at most are tokenized beyond what is needed.
        ids = tokenize(read_text("--texts", file)[: needed * length * 12])
        found = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        if len(found) < parts:
            most = f"{max(len(ids) // parts - 1, 0):,}"
            flag, value = max(("--prompt", prompt), ("--tokens", tokens), key=lambda flag: flag[1])
            if not ids:
                raise ValueError(f"--texts {file}: empty; allowed are texts")
            room = f"--texts {file} has {len(ids):,} tokens; allowed are {most} of --prompt and --tokens together"
            raise ValueError(f"{flag} {value}: {room}, or more text")
        if len(found) < needed:
            flag = "--samples" if samples == count else "--batches"
            room = f"--texts {file} has {len(found)} samples of {length} tokens"
            most = f"{len(found) // parts * len(files)}, as of each of {len(files)} files"
            raise ValueError(f"{flag} {count}: {room}; allowed are {most}, or shorter ones")
        by_file.append([Sample(one[:prompt], one[prompt:]) for one in found[:needed]])
    turns = list(zip(*by_file, strict=True))
    return [list(chain(*turns[part::parts]))[:count] for part in range(parts)]
