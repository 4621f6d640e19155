"""Servers of dummy checkpoints side by side on one GPU, and rounds of upstream's bench_serving over them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmark.common.comparison import Comparison, format_experts, measure
from benchmark.common.record import Record
from benchmark.common.rounds import Workload, serve
from benchmark.common.server import Server
from benchmark.common.summary import Summary
from benchmark.common.variant import Variant
from benchmark.gpu.models import write_model, write_texts

INPUT_TOKENS, OUTPUT_TOKENS = 128, 256
START_LIMIT = 420.0  # seconds; the first start compiles kernels
DUMMY_SERVER = "benchmark.gpu.dummy_server"
SERVER_ARGS = (
    *(
        "--load-format",
        "dummy",
        "--dtype",
        "bfloat16",
        "--attention-backend",
        "triton",
        "--sampling-backend",
        "pytorch",
    ),
    *("--max-running-requests", "32", "--max-total-tokens", "16384", "--chunked-prefill-size", "4096"),
    *("--mm-feature-transport", "cpu", "--disable-radix-cache", "--disable-prefill-cuda-graph"),
    # Only leaves room for graphs: the tokens above decide the cache's size, and two models share the memory.
    *("--mem-fraction-static", "0.95"),
)
RUNNER_ARGS = {
    "qwen3-30b-a3b": ("--moe-runner-backend", "triton"),
    "gpt-oss": ("--moe-runner-backend", "triton_kernel"),
}


@contextmanager
def serve_dummies(
    name: str, variants: Sequence[Variant], args: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Iterator[list[Server]]:
    """A server of the model `name` for every variant, ready; stopped whatever happens."""
    flags = [*runner_args(name), *SERVER_ARGS, *args]
    with serve(write_model(name), variants, flags, env, START_LIMIT, DUMMY_SERVER) as servers:
        yield servers


def runner_args(name: str) -> tuple[str, ...]:
    """The flags of the MoE runner that serves this model on Hopper."""
    return next(args for family, args in RUNNER_ARGS.items() if name.startswith(family))


def measure_rounds(
    record: Record,
    key: str,
    name: str,
    variants: Sequence[Variant],
    servers: Sequence[Server],
    concurrency: int,
    rounds: int,
) -> None:
    """Alternating rounds at one concurrency, kept under `key` after each."""
    workload = Workload(
        model=write_model(name),
        texts=write_texts(name, INPUT_TOKENS),
        rounds=rounds,
        requests=max(2 * concurrency, 4),
        concurrency=concurrency,
        input_tokens=INPUT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
    )
    print(key, flush=True)
    measure(record, key, workload, variants, servers)


@dataclass(frozen=True)
class Gain:
    """What the second variant of a comparison is to the first."""

    off: Summary
    on: Summary

    @classmethod
    def read(cls, point: Mapping[str, Any]) -> "Gain":
        """Out of a record, where `measure_rounds` left it."""
        return cls(*Comparison.read(point).summaries)

    @property
    def percent(self) -> float:
        """Percent more output tokens a second: the median of the ratios within each round."""
        return 100 * (self.on.paired_ratio.median - 1)

    def __str__(self) -> str:
        """Tokens a second before and after, and the active experts where the server counted them."""
        text = f"{self.off.throughput.median:.0f} -> {self.on.throughput.median:.0f} tokens/s"
        return text if self.on.experts_after is None else f"{text}, {format_experts(self.on)} experts"
