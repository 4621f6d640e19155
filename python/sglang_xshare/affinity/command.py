"""The subcommand `calibrate`."""

from __future__ import annotations

import argparse
from functools import partial

from ..files import read_text, try_file
from ..parser import path, whole
from ..upstream.configuration import NUM_EXPERTS

DESCRIPTION = "measure the table of expert signatures that --expert-affinity takes, by letting a model read texts"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand `calibrate`."""
    parser = subparsers.add_parser("calibrate", help=DESCRIPTION, description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--model", type=path, required=True, metavar="DIR", help="a folder with the checkpoint")
    parser.add_argument("--texts", type=path, required=True, metavar="DIR", help="a folder of *.txt like your traffic")
    parser.add_argument("--out", type=path, required=True, metavar="FILE", help="the table, a safetensors file")
    most = "read at most N tokens of each text (default: 100000)"
    parser.add_argument("--tokens", type=whole(256), default=100_000, metavar="N", help=most)
    parser.set_defaults(run=run, name="calibrate")


def run(arguments: argparse.Namespace) -> int:
    """Measure the table and write it to a file.

    Raises ValueError if an argument is wrong, and OSError if a file cannot be read or written.
    """
    try_file("--out", arguments.out)
    folder = arguments.model
    config = read_text("--model", folder / "config.json")  # transformers reads it later, and accepts more than orjson
    if not any(f'"{name}"' in config for name in NUM_EXPERTS):  # the key may be nested
        raise ValueError(f"--model {folder}: must be a Mixture-of-Experts model; its config.json has no experts")
    import torch
    from rich.progress import track

    from .calibration import LENGTH, calibrate, load_model, read_texts

    pieces = read_texts(arguments.texts, folder, LENGTH, arguments.tokens)
    try:
        model = load_model(folder, "cuda" if torch.cuda.is_available() else "cpu")
        table = calibrate(model, folder, pieces, progress=partial(track, description="reading"))
    except RuntimeError as error:  # raised by torch on a device with too little memory
        raise ValueError(str(error)) from None
    table.save(arguments.out)
    size = f"{arguments.out.stat().st_size / 2**20:.1f} MiB, from {pieces.numel()} tokens"
    print(f"{arguments.out}: {table.vocabulary} ids x {table.signatures.shape[1]} dimensions, {size}")
    return 0
