"""Servers of dummy checkpoints on one GPU, which SGLang's bench_serving measures in alternating rounds."""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import mean

from benchmark.common.comparison import Comparison, format_experts, format_number, measure_each
from benchmark.common.interval import find_margin
from benchmark.common.record import Record
from benchmark.common.rounds import Workload, serve
from benchmark.common.server import Server
from benchmark.common.variant import Variant
from benchmark.gpu.models import read_config, write_model, write_texts
from benchmark.gpu.table import Row, at_least
from benchmark.gpu.toggle import TOGGLED

INPUT_TOKENS, OUTPUT_TOKENS = 128, 256
LEAST_REQUESTS = 8
ROUNDS = 4
"""The number of rounds in a comparison. It is even, so each variant is first in half of the rounds."""
BLOCK = 2
"""The number of rounds that are measured at one concurrency before the next concurrency has its turn."""
START_LIMIT = 420.0  # maximum seconds for the start of a server; the first start compiles kernels
ROOM = 125 << 30
"""The free GPU memory in bytes for a server in parallel with other work, or for all servers of `replay` at once.

An H200 has this memory, and an H100 does not. The number is an estimate. The server of gpt-oss-120b needs 77 GiB while
it converts its weights. The processes that run at the same time need 48 GiB. The five servers of `replay` need 95 GiB.
"""
DUMMY_SERVER = "benchmark.gpu.dummy_server"
SERVER_ARGS = (
    *("--load-format", "dummy", "--dtype", "bfloat16"),
    *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--max-running-requests", "32", "--max-total-tokens", "16384", "--chunked-prefill-size", "4096"),
    *("--mm-feature-transport", "cpu", "--disable-radix-cache", "--disable-prefill-cuda-graph"),
    # This leaves memory for CUDA graphs only. The number of tokens above limits the KV cache.
    *("--mem-fraction-static", "0.95"),
)
RUNNER_ARGS: dict[str, tuple[str, ...]] = {
    "qwen3-30b-a3b": ("--moe-runner-backend", "triton"),
    "gpt-oss": ("--moe-runner-backend", "triton_kernel"),
}


@contextmanager
def serve_dummies(name: str, variants: Sequence[Variant]) -> Iterator[list[Server]]:
    """Start a server of the model `name` for every variant. Raises RuntimeError if their KV caches differ in size."""
    flags = [*runner_args(name), *SERVER_ARGS]
    with serve(write_model(name), variants, flags, deadline=START_LIMIT, program=DUMMY_SERVER) as servers:
        check_caches(servers)
        yield servers


def make_toggled(name: str, variant: Variant, args: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Server:
    """Create a server of the model `name` that can be switched between a policy and SGLang's own routing.

    The server has separate CUDA graphs for both, see `toggle`. It is not started yet.
    """
    flags = ["--enable-metrics", *variant.server_args(), *runner_args(name), *SERVER_ARGS, *args]
    env = {**(env or {}), TOGGLED: "1"}
    return Server(write_model(name), flags, env=env, name=name, deadline=START_LIMIT, program=DUMMY_SERVER)


def has_room() -> bool:
    """Return whether the first GPU has `ROOM` bytes of free memory. Return False if this is unknown."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True).stdout.split()[0]) << 20 >= ROOM
    except (OSError, ValueError, IndexError):
        return False


def check_caches(servers: Sequence[Server]) -> None:
    """Raise RuntimeError if the KV caches of the servers differ in size. The last server can have too little memory."""
    tokens = {server.name: server.get("/server_info")["max_total_num_tokens"] for server in servers}
    if len(set(tokens.values())) > 1:
        sizes = ", ".join(f"{name} {count}" for name, count in tokens.items())
        raise RuntimeError(f"the caches of all servers must hold the same number of tokens (got {sizes})")


def runner_args(name: str) -> tuple[str, ...]:
    """Return the flags that choose the MoE runner for this model on a Hopper GPU."""
    return next(args for family, args in RUNNER_ARGS.items() if name.startswith(family))


@dataclass(frozen=True)
class Point:
    """A comparison of variants at one concurrency, with its key in the record. The first variant is the baseline."""

    key: str
    variants: Sequence[Variant]
    concurrency: int


def measure_rounds(
    record: Record, name: str, points: Sequence[Point], servers: Sequence[Server], temperature: float = 1.0
) -> None:
    """Measure alternating rounds of all points.

    The points take turns after every `BLOCK` rounds, so an interrupted run has rounds of each point. `servers` contains
    one server for each variant of a point. A server that occurs twice is switched between rounds. Each round is
    recorded when it ends. Old rounds are deleted if their workload or their number of layers differs.

    Tokens are sampled at `temperature`. With random weights, greedy tokens are soon the same in many rows, and these
    rows activate the same experts. On an H100, 16 rows with greedy tokens activated only 37.8 of 128 experts.
    """
    running = [_begin(record, name, point, servers, temperature) for point in points]
    for _ in range(0, ROUNDS, BLOCK):
        for turns in running:
            for _ in range(BLOCK):
                next(turns, None)


def _begin(record: Record, name: str, point: Point, servers: Sequence[Server], temperature: float) -> Iterator[int]:
    """Measure the missing rounds of a point, and yield after each round."""
    workload = Workload(
        model=write_model(name),
        texts=write_texts(name, INPUT_TOKENS),
        rounds=ROUNDS,
        requests=max(2 * point.concurrency, LEAST_REQUESTS),
        concurrency=point.concurrency,
        input_tokens=INPUT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        temperature=temperature,
    )
    if point.key in record:
        former = Comparison.read(record.points[point.key]).workload
        is_same = replace(former, model=workload.model, texts=workload.texts) == workload
        if not is_same or former.model.name != workload.model.name:
            del record.points[point.key]
    print(point.key, flush=True)
    yield from measure_each(record, point.key, workload, point.variants, servers)


def list_percents(comparison: Comparison) -> list[float]:
    """Return the gain of the second variant for each round, in percent of the output tokens per second."""
    return [100 * (ratio - 1) for ratio in comparison.summaries[1].ratios]


def gain_row(comparison: Comparison, what: str, bar: float | None = None, of: str | None = None) -> Row:
    """Return a row with the gain of the second variant.

    The row contains the tokens per second of both variants. If the server counted experts, the row also contains the
    active experts and the kept mass. `bar` is the expected gain of the model `of`. It is not used for a model with
    fewer layers.
    """
    (off, on), percents, model = comparison.summaries, list_percents(comparison), comparison.workload.model.name
    text = f"{what}: {off.throughput.median:.0f} -> {on.throughput.median:.0f} tokens/s"
    if on.experts_after is not None:
        text += f", {format_experts(on)} experts, kept mass {format_number(on.kept_mass, 3)}"
    row = at_least(text, mean(percents), bar, "% gain", find_margin(percents))
    if of is not None and model != of and bar is not None:
        row = replace(row, bar=f"- (the bar is of {read_config(of)['num_hidden_layers']} layers)", passed=None)
    return replace(row, runner=" and ".join(dict.fromkeys(_find_runner(one.command) for one in comparison.series)))


def _find_runner(command: Sequence[str]) -> str:
    """Return the MoE runner in the command of a server."""
    return command[command.index("--moe-runner-backend") + 1] if "--moe-runner-backend" in command else "auto"
