"""The widened checkpoint: the trained checkpoint with wider experts but the same outputs.

Each inner neuron of an expert is repeated `FACTOR` times, and its output weights are divided by `FACTOR`. So the
routing is unchanged, and the logits differ only by rounding. Loading the wider experts takes most of the time of a
decode step on a CPU. Large models on a GPU behave in the same way. The model is created at first use, within seconds,
and needs 0.4 GB.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from benchmark.common.paths import TRAINED, WIDENED
from benchmark.common.server import has_gpu

if TYPE_CHECKING:
    import torch

    from sglang_xshare.check.weights import Weights

FACTOR = 64
"""A power of two, so that the division is exact in bfloat16. With factor 64, an expert has 3.1 MB in float32."""
SERVED_DTYPE = "float32"
"""The dtype on a CPU, where arithmetic limits the speed of bfloat16.

One core processes 5.1 GB/s of expert weights in bfloat16 with AMX, 3.6 GB/s without AMX, and 9 GB/s in float32. The
measurement used F.linear with three rows per expert. The CPU was a Xeon of family 6, model 167.
"""
INWARD, OUTWARD = (re.compile(rf"\.experts\.\d+\.{name}\.weight$") for name in ("(gate|up)_proj", "down_proj"))


STAMP = "widened.json"
"""The file that describes the source of a widened model. The model is created again if the description changes."""
LEFT_OUT = ("README.md", "report.json")


def make(folder: Path = WIDENED, source: Path = TRAINED, factor: int = FACTOR) -> bool:
    """Create the widened model of `source` in `folder`.

    The folder appears only when it is complete. Return False if the model exists already, or if another process creates
    it first.
    """
    stamp = _describe(source, factor)
    if _is_made(folder, stamp):
        return False
    from safetensors.torch import load_file, save_file  # imported only if the model must be created

    began = time.monotonic()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        half = Path(scratch) / folder.name
        shutil.copytree(source, half, ignore=shutil.ignore_patterns("*.safetensors", *LEFT_OUT))
        (half / "config.json").write_text(json.dumps(_configure(source, factor), indent=2) + "\n")
        weights = load_file(source / "model.safetensors")
        widened = {name: widen(name, weight, factor) for name, weight in weights.items()}
        save_file(widened, half / "model.safetensors", metadata={"format": "pt"})
        (half / STAMP).write_text(stamp)
        if not _is_made(folder, stamp):
            with suppress(FileNotFoundError):
                folder.rename(Path(scratch) / "old")  # not deleted, because a running server may have its files open
        try:
            half.rename(folder)
        except OSError:
            if not _is_made(folder, stamp):
                raise
            return False
    print(f"{folder}: made in {time.monotonic() - began:.0f} s", flush=True)
    return True


def widen(name: str, weight: torch.Tensor, factor: int) -> torch.Tensor:
    """Return the widened form of a weight. Weights outside experts are returned unchanged.

    Input weights of the inner neurons become [factor * width, hidden], output weights [hidden, factor * width].
    """
    if INWARD.search(name):
        return weight.repeat(factor, 1)
    return weight.repeat(1, factor) / factor if OUTWARD.search(name) else weight


def prepare(model: Path) -> list[str]:
    """Return the additional server flags that `model` needs. The widened model is created at first use."""
    if model != WIDENED:
        return []
    make()
    return [] if has_gpu() else ["--dtype", SERVED_DTYPE]


def read_widened() -> Weights:
    """Return the sizes of the widened model's weights on a CPU. The model need not exist."""
    from sglang_xshare.check.server import read_flags
    from sglang_xshare.check.weights import read_weights

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_configure(TRAINED, FACTOR)))
        return read_weights(Path(folder), read_flags(["--dtype", SERVED_DTYPE]))


def _describe(source: Path, factor: int) -> str:
    files = sorted(path for path in source.iterdir() if path.is_file() and path.name not in LEFT_OUT)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return json.dumps({"factor": factor, "sha256": digests}, indent=2) + "\n"


def _is_made(folder: Path, stamp: str) -> bool:
    return (folder / STAMP).is_file() and (folder / STAMP).read_text() == stamp


def _configure(source: Path, factor: int) -> dict[str, object]:
    config = json.loads((source / "config.json").read_text())
    return {**config, "moe_intermediate_size": config["moe_intermediate_size"] * factor}
