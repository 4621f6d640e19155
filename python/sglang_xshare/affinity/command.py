"""The verb `calibrate`: its flags, its progress, its exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import try_file

if TYPE_CHECKING:
    import torch

DESCRIPTION = "measure the table of expert signatures that --expert-affinity takes, by letting a model read texts"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `calibrate`."""
    parser = subparsers.add_parser("calibrate", help=DESCRIPTION, description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="a folder with the checkpoint")
    parser.add_argument("--texts", type=Path, required=True, metavar="DIR", help="a folder of *.txt, as to be served")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the table, a safetensors file")
    parser.add_argument(
        "--dimensions", type=int, default=32, metavar="N", help="of a signature, 16 to 64 (default: 32)"
    )
    parser.add_argument("--length", type=int, default=256, metavar="N", help="tokens read at once (default: 256)")
    most = "tokens of each text at most (default: 100000)"
    parser.add_argument("--tokens", type=int, default=100_000, metavar="N", help=most)
    parser.add_argument("--device", metavar="NAME", help="where the model runs (default: cuda where there is one)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and write the table. Returns 0, or 1 for what cannot be measured or written."""
    try:
        _check(arguments)
        _calibrate(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"calibrate: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if not 16 <= arguments.dimensions <= 64:
        raise ValueError(f"--dimensions {arguments.dimensions}: allowed is 16 to 64")
    for name in ("length", "tokens"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name} {getattr(arguments, name)}: allowed is a whole number above 0")
    if not arguments.out.parent.is_dir():
        raise ValueError(f"--out {arguments.out}: no folder {arguments.out.parent}; allowed is a file in one")
    if arguments.out.is_dir():
        raise ValueError(f"--out {arguments.out}: a folder; allowed is a file in one")
    try_file("--out", arguments.out)


def _calibrate(arguments: argparse.Namespace) -> None:
    import torch

    from .calibration import calibrate, load_model, read_texts

    pieces, texts = read_texts(arguments.texts, arguments.model, arguments.length, arguments.tokens)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(arguments.model, device)
    table = calibrate(model, arguments.model, pieces, texts, arguments.dimensions, progress=_show_progress)
    table.save(arguments.out)
    size = f"{table.vocabulary} ids x {table.dimensions} dimensions, {arguments.out.stat().st_size / 2**20:.1f} MiB"
    of = f"{pieces.numel()} tokens, {table.origin.layers} layers of {table.origin.experts} experts"
    print(f"{arguments.out}: {size}, from {of}")


def _show_progress(batches: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    from rich.progress import track

    yield from track(batches, description="reading")
