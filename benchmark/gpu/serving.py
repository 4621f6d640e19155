"""Servers of dummy checkpoints on one GPU, and rounds of upstream's bench_serving over them."""

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
"""Rounds of a comparison. An even number: each variant is first in half of them."""
BLOCK = 2
"""Rounds of one concurrency before the next concurrency has its turn."""
START_LIMIT = 420.0  # seconds; the first start compiles kernels
ROOM = 125 << 30
"""Free bytes for a server beside other work, or for all servers of `replay`: an H200 has them, an H100 does not.

Estimated: 77 GiB of gpt-oss-120b's server, which converts its weights, beside 48 GiB of the contexts and layers of what
runs meanwhile. The five servers of `replay` need 95 GiB.
"""
DUMMY_SERVER = "benchmark.gpu.dummy_server"
SERVER_ARGS = (
    *("--load-format", "dummy", "--dtype", "bfloat16"),
    *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--max-running-requests", "32", "--max-total-tokens", "16384", "--chunked-prefill-size", "4096"),
    *("--mm-feature-transport", "cpu", "--disable-radix-cache", "--disable-prefill-cuda-graph"),
    # This reserves memory for graphs alone: the tokens above decide the cache's size, and two models share the memory.
    *("--mem-fraction-static", "0.95"),
)
RUNNER_ARGS: dict[str, tuple[str, ...]] = {
    "qwen3-30b-a3b": ("--moe-runner-backend", "triton"),
    "gpt-oss": ("--moe-runner-backend", "triton_kernel"),
}


@contextmanager
def serve_dummies(name: str, variants: Sequence[Variant]) -> Iterator[list[Server]]:
    """Serve model `name` for every variant. Raises RuntimeError if the servers' caches differ in size."""
    flags = [*runner_args(name), *SERVER_ARGS]
    with serve(write_model(name), variants, flags, deadline=START_LIMIT, program=DUMMY_SERVER) as servers:
        check_caches(servers)
        yield servers


def make_toggled(name: str, variant: Variant, args: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Server:
    """Return a server of model `name`, not started, that serves `variant` and, after a switch, upstream's own routing.

    Both run from CUDA graphs of their own, see `toggle`.
    """
    flags = ["--enable-metrics", *variant.server_args(), *runner_args(name), *SERVER_ARGS, *args]
    env = {**(env or {}), TOGGLED: "1"}
    return Server(write_model(name), flags, env=env, name=name, deadline=START_LIMIT, program=DUMMY_SERVER)


def has_room() -> bool:
    """Return whether the first GPU has `ROOM`; False if the driver does not report the free memory."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(query, capture_output=True, text=True).stdout.split()[0]) << 20 >= ROOM
    except (OSError, ValueError, IndexError):
        return False


def check_caches(servers: Sequence[Server]) -> None:
    """Raise RuntimeError for servers of unequal caches: the server that loaded last would have less memory."""
    tokens = {server.name: server.get("/server_info")["max_total_num_tokens"] for server in servers}
    if len(set(tokens.values())) > 1:
        sizes = ", ".join(f"{name} {count}" for name, count in tokens.items())
        raise RuntimeError(f"the caches of all servers must hold the same number of tokens (got {sizes})")


def runner_args(name: str) -> tuple[str, ...]:
    """Return the flags of the MoE runner that serves this model on Hopper."""
    return next(args for family, args in RUNNER_ARGS.items() if name.startswith(family))


@dataclass(frozen=True)
class Point:
    """A comparison at one concurrency, kept in the record under `key`; the first of `variants` is the baseline."""

    key: str
    variants: Sequence[Variant]
    concurrency: int


def measure_rounds(
    record: Record, name: str, points: Sequence[Point], servers: Sequence[Server], temperature: float = 1.0
) -> None:
    """Measure alternating rounds of every point, `BLOCK` at a time, so a run that is cut has rounds of each.

    `servers` has one server for each variant of a point; a server that occurs twice is switched between rounds. Each
    round is in the record when it ends. Rounds of another workload, or of a model of fewer layers, are deleted.

    Tokens are drawn at `temperature`: the likeliest tokens of random weights soon repeat across rows, which then have
    the same experts. On an H100 16 rows of greedy tokens had 37.8 of 128 active.
    """
    running = [_begin(record, name, point, servers, temperature) for point in points]
    for _ in range(0, ROUNDS, BLOCK):
        for turns in running:
            for _ in range(BLOCK):
                next(turns, None)


def _begin(record: Record, name: str, point: Point, servers: Sequence[Server], temperature: float) -> Iterator[int]:
    """Yield after each round of a point that the record lacks."""
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
    """Return percent more output tokens a second of the second variant, by round."""
    return [100 * (ratio - 1) for ratio in comparison.summaries[1].ratios]


def gain_row(comparison: Comparison, what: str, bar: float | None = None, of: str | None = None) -> Row:
    """Return the gain of the second variant beside the bar of model `of`; a model with fewer layers has no bar.

    The row has tokens a second off and on, and the active experts and the kept mass if the server counted them.
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
    """Return the MoE runner that a server's command requests."""
    return command[command.index("--moe-runner-backend") + 1] if "--moe-runner-backend" in command else "auto"
