"""The table of signatures, a vector for each token id. `calibrate` writes the table, `--expert-affinity` reads it."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..upstream.configuration import NUM_EXPERTS, find_value

FORMAT = "sglang-xshare expert affinity 2"
READ = 4096
"""The most tokens of a prompt that its signature averages. In each domain of the shipped checkpoint's corpus, the mean
of 4096 evenly spaced tokens has a cosine similarity of at least 0.997 to the mean of all 23,000 to 56,000 tokens; the
means of two domains have at most 0.8.
"""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Table:
    """A table of signatures.

    `signatures` of token ids: [vocabulary, dimensions] float16, centred on the mean token of the texts, 0 for an id
    that is absent from the texts. `samples`: [samples, dimensions] float16, unit signatures of pieces of the texts,
    from which centroids start. `origin`: the measured model, from `describe_model`.
    """

    signatures: npt.NDArray[np.float16]
    samples: npt.NDArray[np.float16]
    origin: dict[str, str]

    @property
    def vocabulary(self) -> int:
        """Return the number of token ids."""
        return len(self.signatures)

    def sign(self, tokens: Sequence[int]) -> Floats | None:
        """Return a prompt's unit signature [dimensions], of up to `READ` evenly spaced tokens; None if it has none."""
        ids = to_ids(tokens[:: max(math.ceil(len(tokens) / READ), 1)])
        known = ids[(ids >= 0) & (ids < self.vocabulary)]  # other ids stand for images and the like
        if not len(known):
            return None
        mean = self.signatures[known].mean(0, dtype=np.float32)
        length = float(np.linalg.norm(mean))
        return mean / length if length > 1e-6 else None

    def save(self, path: Path) -> None:
        """Write the table. Raises OSError for a file that cannot be written."""
        tensors = {"signatures": self.signatures, "samples": self.samples}
        path.write_bytes(save(tensors, {"format": FORMAT, **self.origin}))


def to_ids(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return token ids as an array; -1 for a number beyond 64 bits, which a client may send."""
    try:
        return np.asarray(tokens, dtype=np.int64)
    except OverflowError:
        return np.array([token if abs(token) < 2**63 else -1 for token in tokens], dtype=np.int64)


def load_table(path: Path) -> Table:
    """Read a table. Raises ValueError, in one line, for any other file."""
    if path.is_dir():
        raise ValueError("a folder")
    try:
        with safe_open(path, "numpy") as file:
            origin = file.metadata() or {}
            if origin.pop("format", None) != FORMAT:
                raise ValueError("no table of signatures, or a table of another version: calibrate again")
            return Table(file.get_tensor("signatures"), file.get_tensor("samples"), origin)
    except (OSError, SafetensorError) as error:
        raise ValueError(getattr(error, "strerror", None) or " ".join(str(error).split())) from None


def describe_model(text_config: Any, folder: Path) -> dict[str, str]:
    """Return a model's identity, from its text configuration and tokenizer; "" for a missing property."""
    found = {
        "model type": getattr(text_config, "model_type", ""),
        "number of layers": getattr(text_config, "num_hidden_layers", ""),
        "number of experts": find_value(text_config, NUM_EXPERTS) or "",
        "vocabulary": text_config.vocab_size,
        "tokenizer": hash_tokenizer(folder),
    }
    return {name: str(value) for name, value in found.items()}


def hash_tokenizer(model: Path) -> str:
    """Return the sha256 of a model's tokenizer.json, "" for a folder without this file."""
    file = model / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
