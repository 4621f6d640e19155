"""Calibration of the dispatcher's table. The calibration text is not used in any measurement."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from benchmark.common.paths import BUILD
from sglang_xshare.affinity.calibration import calibrate, read_texts
from sglang_xshare.affinity.table import Table
from training.corpus import load_corpus

LENGTH = 192


def write_texts(folder: Path = BUILD / "affinity" / "texts") -> Path:
    """Write the development text of the corpus into a folder, one file for each domain, and return the folder.

    This text is used neither for training nor as held-out text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for domain, split in load_corpus().items():
        (folder / f"{domain}.txt").write_text("\n".join(document.text for document in split.dev))
    return folder


def make_table(model: PreTrainedModel, path: Path, tokens: int) -> Table:
    """Calibrate the table of a model on at most `tokens` tokens of each domain.

    `path` is the checkpoint folder of the model.
    """
    print("calibrating ...", flush=True)
    pieces = read_texts(write_texts(), path, min(LENGTH, tokens), tokens)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    return calibrate(model, path, pieces[order])
