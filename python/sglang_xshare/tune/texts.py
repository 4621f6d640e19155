"""The user's texts, cut into samples of equal length. Some are for tuning, the others for confirmation."""

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
    folder: Path, tokenize: Callable[[str], list[int]], prompt: int, tokens: int, samples: int, parts: int = 2
) -> list[list[Sample]]:
    """Read samples from the *.txt of a folder. Return a list of `samples` samples for each part.

    The samples of a file go to the parts in turn, because the end of a text may be unlike its beginning. Within a part,
    the files alternate, so a batch contains samples of all files. Each sample has one more token, which the prefill
    predicts. Raises ValueError if the folder contains no texts or too little text.
    """
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise ValueError(f"--texts {folder}: must be a folder of plain texts (got no *.txt)")
    length, needed = prompt + tokens + 1, parts * -(-samples // len(files))
    by_file: list[list[Sample]] = []
    for file in files:
        # Twelve characters for each token are more than enough, so the text beyond is not tokenized.
        ids = tokenize(read_text("--texts", file)[: needed * length * 12])
        found = [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)][:needed]
        if len(found) < needed:
            reason = f"{len(ids):,} tokens, {len(found)} samples of --prompt and --tokens; must have {needed} samples"
            raise ValueError(f"--texts {file}: {reason}, or use fewer --samples and smaller --batches")
        by_file.append([Sample(one[:prompt], one[prompt:]) for one in found])
    turns = list(zip(*by_file, strict=True))
    return [list(chain(*turns[part::parts]))[:samples] for part in range(parts)]
