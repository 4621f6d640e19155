"""Compare the CPU attention of one layer for padded batches and for one request at a time.

    python sgl-kernel/benchmark/attention.py

`paged_attention` makes the padded batches. The script prints the median CPU time of `REPEATS` calls in microseconds,
and the ratio of both times. The shapes are those of decode, verify and prefill.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernel.attention import paged_attention

REPEATS = 30


@dataclass(frozen=True)
class Shape:
    """A batch of requests: their tokens in the cache, their new tokens, and the number and size of the heads."""

    name: str
    seq_lens: tuple[int, ...]
    queries: int
    heads: int = 16
    kv_heads: int = 4
    head_size: int = 64
    tree: bool = False


SHAPES = (
    Shape("decode, 16 of 64 tokens, small model", (64,) * 16, 1, heads=4, kv_heads=2, head_size=32),
    Shape("decode, 16 of 64 tokens", (64,) * 16, 1),
    Shape("decode, 16 of 16 to 1024", tuple(16 + 67 * i for i in range(16)), 1),
    Shape("verify a chain, 16 of 64", (64,) * 16, 4),
    Shape("verify a tree, 16 of 64", (64,) * 16, 8, tree=True),
    Shape("prefill, 1 of 512", (512,), 512),
)


def attention_calls(shape: Shape) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a function that runs the whole batch in one call, and a function that runs one call for each request."""
    torch.manual_seed(0)
    batch, longest, slots = len(shape.seq_lens), max(shape.seq_lens), sum(shape.seq_lens)
    query = torch.randn(batch * shape.queries, shape.heads, shape.head_size, dtype=torch.bfloat16)
    k_buffer, v_buffer = torch.randn(2, slots, shape.kv_heads, shape.head_size, dtype=torch.bfloat16)
    output = torch.empty_like(query)
    table = torch.randint(slots, (batch, longest), dtype=torch.int32)
    rows, seq_lens = torch.arange(batch), torch.tensor(shape.seq_lens)
    counts, starts = torch.full((batch,), shape.queries), torch.arange(batch) * shape.queries
    mask = torch.ones(batch, shape.queries, shape.queries, dtype=torch.bool).tril() if shape.tree else None

    def attend(part: slice, tree_mask: Tensor | None) -> None:
        paged_attention(
            query,
            k_buffer,
            v_buffer,
            output,
            table,
            rows[part],
            seq_lens[part],
            counts[part],
            starts[part],
            scale=shape.head_size**-0.5,
            tree_mask=tree_mask,
        )

    def one_by_one() -> None:
        for i in range(batch):
            attend(slice(i, i + 1), None if mask is None else mask[i].flatten())

    return lambda: attend(slice(None), None if mask is None else mask.flatten()), one_by_one


def microseconds(call: Callable[[], None]) -> float:
    """Return the median CPU time of a call, which does not include other processes. Three warm-up calls run first."""
    for _ in range(3):
        call()
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    return statistics.median(times) * 1e6


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'one layer, one thread, bfloat16 cache':40} {'batched us':>11} {'one by one us':>14} {'ratio':>6}")
    for shape in SHAPES:
        batched, single = (microseconds(call) for call in attention_calls(shape))
        print(f"{shape.name:40} {batched:11.0f} {single:14.0f} {single / batched:6.1f}", flush=True)


if __name__ == "__main__":
    main()
