"""The table of signatures, a vector a token id: what `sglang-xshare calibrate` writes and `--expert-affinity` reads."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

FORMAT = "sglang-xshare expert affinity 1"
READ = 4096
"""Tokens of a prompt that its signature is the mean of, at most. Of the 23,000 to 56,000 tokens of each domain of the
shipped checkpoint's corpus, 4096 evenly taken have a cosine similarity of at least 0.997 to all of them; two domains
have at most 0.8.
"""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Origin:
    """What a table was measured on. `model`: the configuration's model type; `layers`: MoE layers; `tokenizer` and
    `texts`: sha256 sums, the former "" without a tokenizer.json.
    """

    model: str
    layers: int
    experts: int
    tokenizer: str
    texts: str
    tokens: int


@dataclass(frozen=True)
class Table:
    """`signatures` of token ids: [vocabulary, dimensions] float16, centred on the mean token of the texts, 0 for an id
    that they lack. `samples`: [samples, dimensions] float16, unit signatures of pieces of the texts, where centroids
    start.
    """

    signatures: npt.NDArray[np.float16]
    samples: npt.NDArray[np.float16]
    origin: Origin

    @property
    def vocabulary(self) -> int:
        """Token ids."""
        return len(self.signatures)

    @property
    def dimensions(self) -> int:
        """Of a signature."""
        return int(self.signatures.shape[1])

    def sign(self, tokens: Sequence[int]) -> Floats | None:
        """The unit signature [dimensions] of a prompt, of at most `READ` tokens, evenly taken; None where the table
        knows none of its ids. Those beyond the vocabulary, which stand for images and the like, say nothing.
        """
        ids = to_ids(tokens[:: max(math.ceil(len(tokens) / READ), 1)])
        known = ids[(ids >= 0) & (ids < self.vocabulary)]
        if not len(known):
            return None
        return unit(self.signatures[known].mean(0, dtype=np.float32))

    def save(self, path: Path) -> None:
        """Write it. Raises OSError where that cannot be."""
        origin = {name: str(value) for name, value in asdict(self.origin).items()}
        tensors = {"signatures": self.signatures, "samples": self.samples}
        path.write_bytes(save(tensors, {"format": FORMAT, **origin}))


def to_ids(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """Token ids as an array; -1 for what 64 bits do not hold, which clients of the example may send."""
    try:
        return np.asarray(tokens, dtype=np.int64)
    except OverflowError:
        return np.array([token if abs(token) < 2**63 else -1 for token in tokens], dtype=np.int64)


def unit(vector: Floats) -> Floats | None:
    """The vector [dimensions] at length 1; None for one of no length."""
    length = float(np.linalg.norm(vector))
    return vector / length if length > 1e-6 else None


def load_table(path: Path) -> Table:
    """Read a table. Raises ValueError, in one line, for a file that is none."""
    if path.is_dir():
        raise ValueError("a folder")
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError("not a table of signatures")
            signatures, samples = (_read_numbers(file, name) for name in ("signatures", "samples"))
        origin = _read_origin(metadata)
        _check(signatures, samples)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from None
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    return Table(signatures, samples, origin)


def _read_numbers(file: Any, name: str) -> npt.NDArray[np.float16]:
    kind = file.get_slice(name).get_dtype()  # numpy lacks some of them
    if kind != "F16":
        raise ValueError(f"{name}: {kind}; allowed is F16")
    numbers: npt.NDArray[np.float16] = file.get_tensor(name)
    return numbers


def _read_origin(metadata: dict[str, str]) -> Origin:
    found: dict[str, Any] = {one.name: metadata[one.name] for one in fields(Origin)}
    for name in ("layers", "experts", "tokens"):
        found[name] = int(found[name])
        if found[name] < 1:
            raise ValueError(f"measured on {found[name]} {name}; allowed is a whole number above 0")
    return Origin(**found)


def _check(signatures: npt.NDArray[np.float16], samples: npt.NDArray[np.float16]) -> None:
    for name, array in (("signatures", signatures), ("samples", samples)):
        if array.ndim != 2 or not array.size or not np.isfinite(array).all():
            raise ValueError(f"{name}: {list(array.shape)}; allowed are finite numbers in rows")
    if signatures.shape[1] != samples.shape[1]:
        raise ValueError(f"signatures of {signatures.shape[1]} dimensions, samples of {samples.shape[1]}")


def hash_tokenizer(model: Path) -> str:
    """The sha256 of a model's tokenizer.json, empty where its folder has none."""
    file = model / "tokenizer.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
