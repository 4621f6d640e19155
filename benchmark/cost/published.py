"""What others have published of exchanges between GPUs: https://github.com/deepseek-ai/DeepEP, docs/legacy.md."""

from sglang_xshare.estimate.deployment import Deployment, exchange
from sglang_xshare.estimate.machine import Work

ROWS, TOP_K, HIDDEN = 128, 8, 7168
"""Of a rank, of a row, numbers of a row: DeepSeek-V3's decoding."""
DISPATCH, COMBINE = 1 + 4 / 128, 2.0
"""Bytes of a number: fp8 with a scale of four bytes for each 128, and bf16."""
NODE = 8
MICROSECONDS = {
    DISPATCH: {8: 77, 16: 118, 32: 155, 64: 173, 128: 192, 256: 194},
    COMBINE: {8: 114, 16: 195, 32: 273, 64: 314, 128: 369, 256: 360},
}
"""By ranks: low-latency kernels on H800, a 400 Gb/s InfiniBand card each."""


def list_exchanges() -> tuple[list[Work], list[float]]:
    """What a rank does in each, and its seconds."""
    works, seconds = [], []
    for size, by_ranks in MICROSECONDS.items():
        for ranks, microseconds in by_ranks.items():
            works.append(exchange(Deployment(ranks, NODE), 1, ROWS * TOP_K * HIDDEN * size))
            seconds.append(microseconds * 1e-6)
    return works, seconds
