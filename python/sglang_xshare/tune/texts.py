"""The user's texts, cut into samples of equal length: half to tune on, half to confirm with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path


@dataclass(frozen=True)
class Sample:
    """A prompt, and the tokens that follow it in the text."""

    prompt: list[int]
    text: list[int]


def read_samples(
    folder: Path, tokenize: Callable[[str], list[int]], prompt: int, tokens: int, count: int
) -> tuple[list[Sample], list[Sample]]:
    """(samples to tune on, samples held out), `count` each, from the *.txt of a folder: every file gives equally many,
    held-out ones from its second half, and files take turns, so that a batch mixes them. One token of each text is the
    prefill's. Raises ValueError where there are none, or too few.
    """
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise ValueError(f"--texts {folder}: no *.txt in it; allowed is a folder of plain texts")
    each, length = -(-count // len(files)), prompt + tokens + 1
    halves: tuple[list[list[Sample]], list[list[Sample]]] = ([], [])
    for file in files:
        # Some six characters a token at most are tokenized beyond what is needed.
        ids = tokenize(file.read_text(errors="replace")[: each * 2 * length * 12])
        found = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]
        if len(found) < 2 * each:
            room = f"{len(found)} samples of {length} tokens"
            raise ValueError(f"--texts {file}: {room}; {2 * each} are needed of each of {len(files)} files")
        samples = [Sample(one[:prompt], one[prompt:]) for one in found[: 2 * each]]
        halves[0].append(samples[:each])
        halves[1].append(samples[each:])
    tuning, held_out = ([one for one in chain(*zip_longest(*half)) if one is not None][:count] for half in halves)
    return tuning, held_out
