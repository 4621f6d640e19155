"""The table of signatures, which contains a vector for each token id.

The command `calibrate` writes the table, and a server with `--expert-affinity` reads it.
"""

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
"""The most tokens of a prompt that are averaged for its signature. In each domain of the shipped checkpoint's corpus,
the mean of 4096 evenly spaced tokens is close to the mean of all 23,000 to 56,000 tokens. Their cosine similarity is at
least 0.997. The means of two domains have a cosine similarity of at most 0.8.
"""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Table:
    """A table of signatures.

    `signatures` [vocabulary, dimensions] float16 contains the signature of each token id, relative to the mean token of
    the texts. An id that is absent from the texts has signature 0. `samples` [samples, dimensions] float16 contains
    unit signatures of pieces of the texts. Centroids start from them. `origin` identifies the measured model (see
    `describe_model`).
    """

    signatures: npt.NDArray[np.float16]
    samples: npt.NDArray[np.float16]
    origin: dict[str, str]

    @property
    def vocabulary(self) -> int:
        """Return the number of token ids."""
        return len(self.signatures)

    def sign(self, tokens: Sequence[int]) -> Floats | None:
        """Return the unit signature [dimensions] of a prompt.

        The signature is the mean over up to `READ` evenly spaced tokens. Return None if no token has a known id, or if
        the mean is 0.
        """
        ids = to_ids(tokens[:: max(math.ceil(len(tokens) / READ), 1)])
        known = ids[(ids >= 0) & (ids < self.vocabulary)]  # other ids stand for images and the like
        if not len(known):
            return None
        mean = self.signatures[known].mean(0, dtype=np.float32)
        length = float(np.linalg.norm(mean))
        return mean / length if length > 1e-6 else None

    def save(self, path: Path) -> None:
        """Write the table to a file. Raises OSError if the file cannot be written."""
        tensors = {"signatures": self.signatures, "samples": self.samples}
        path.write_bytes(save(tensors, {"format": FORMAT, **self.origin}))


def to_ids(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return token ids as an array. A number of more than 64 bits, which a client may send, becomes -1."""
    try:
        return np.asarray(tokens, dtype=np.int64)
    except OverflowError:
        return np.array([token if abs(token) < 2**63 else -1 for token in tokens], dtype=np.int64)


def load_table(path: Path) -> Table:
    """Read a table from a file. Raises ValueError, with a message of one line, if the file is not a table."""
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
    """Return a model's properties from its text configuration and tokenizer. A missing property is ""."""
    found = {
        "model type": getattr(text_config, "model_type", ""),
        "number of layers": getattr(text_config, "num_hidden_layers", ""),
        "number of experts": find_value(text_config, NUM_EXPERTS) or "",
        "vocabulary": text_config.vocab_size,
        "tokenizer": hash_tokenizer(folder),
    }
    return {name: str(value) for name, value in found.items()}


def hash_tokenizer(model: Path) -> str:
    """Return the sha256 of the tokenizer.json in a model's folder, or "" if the file is missing."""
    file = model / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
