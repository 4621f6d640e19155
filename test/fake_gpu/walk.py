"""An experiment of `make gpu` on the GPU that is not there, with few rounds of short answers: how far it comes, not
what it measures.

    python -m fake_gpu.walk layer qwen3-30b-a3b --out FOLDER
"""

import shutil
import sys
import tempfile
from pathlib import Path

from benchmark.common.command import one_line_errors
from benchmark.gpu import __main__, eagle3, paged, replay, server, serving
from sglang_xshare.selection.triton_kernel import tile

SECONDS = 1200.0  # of a server's start on a busy machine


def shorten() -> None:
    """Two rounds of eight tokens; of paged experts one layer, whose stores are the host's memory."""
    serving.OUTPUT_TOKENS = 8
    serving.START_LIMIT = paged.START_LIMIT = SECONDS
    server.ROUNDS = server.FINE_ROUNDS = replay.ROUNDS = eagle3.ROUNDS = paged.ROUNDS = 2
    paged.MODEL = "qwen3-30b-a3b-1-layers"
    # What was timed here is not for the kernel.
    shapes = Path(tempfile.mkdtemp()) / tile.SHAPES_FILE.name
    tile.SHAPES_FILE = Path(shutil.copy(tile.SHAPES_FILE, shapes))


if __name__ == "__main__":
    shorten()
    sys.argv[0] = "benchmark.gpu"
    with one_line_errors("gpu"):
        sys.exit(__main__.main())
