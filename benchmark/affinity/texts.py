"""The table of the trained checkpoint, calibrated on text that no measurement here uses."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmark.common.paths import BUILD
from sglang_xshare.affinity.calibration import calibrate, read_texts
from sglang_xshare.affinity.table import Table
from training.corpus import load_corpus

LENGTH = 192


def write_texts(folder: Path = BUILD / "affinity" / "texts") -> Path:
    """Write the corpus' development text, a file a domain: neither trained on nor held out. Return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for domain, split in load_corpus().items():
        (folder / f"{domain}.txt").write_text("\n".join(document.text for document in split.dev))
    return folder


def make_table(model: PreTrainedModel, path: Path, tokens: int) -> Table:
    """Return the signatures of `model`, loaded from `path`, on at most `tokens` tokens of each domain."""
    print("calibrating ...", flush=True)
    pieces = read_texts(write_texts(), path, min(LENGTH, tokens), tokens)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    return calibrate(model, path, pieces[order])
