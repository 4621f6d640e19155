"""The names and shapes of a model's tensors, read from the headers of its safetensors files."""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

LARGEST_HEADER = 100_000_000
"""The largest size of a header in bytes. The safetensors library has the same limit."""
CONVERTED = ("BF16", "F16", "F32", "F64", "I64", "BOOL")
"""Dtypes of tensors that are not quantized, such as weights, positions and masks."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a model. `stored` is its size in bytes, or None if the server converts the tensor's dtype."""

    name: str
    shape: tuple[int, ...]
    stored: int | None = None

    @property
    def count(self) -> int:
        """Return the number of elements of the tensor."""
        return prod(self.shape)


def read_headers(folder: Path) -> list[Tensor]:
    """Return the tensors of a folder's safetensors files. Return [] if a file is missing or cannot be read."""
    tensors: dict[str, Tensor] = {}
    try:
        for file in _list_files(folder):
            for name, entry in _read_header(file).items():
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    converted = entry["dtype"] in CONVERTED and "scale" not in name
                    tensors[name] = Tensor(name, tuple(entry["shape"]), None if converted else end - begin)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        return []
    return list(tensors.values())


def _list_files(folder: Path) -> list[Path]:
    """Return the files that SGLang loads: the files in the index, or all files if there is no index.

    Without an index, files that begin with "consolidated" are omitted. In Mistral's folders they are a second copy.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / name for name in json.loads(index.read_bytes())["weight_map"].values()})
    return sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))


def _read_header(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > LARGEST_HEADER:
            raise ValueError(f"{file}: must be safetensors")
        header: dict[str, Any] = json.loads(opened.read(length))
    return header
