"""Servers of dummy checkpoints side by side on one GPU, and rounds of upstream's bench_serving over them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmark.common.rounds import Workload, run_rounds
from benchmark.common.server import Server
from benchmark.common.summary import summarize
from benchmark.common.variant import Variant
from benchmark.gpu.models import write_model, write_texts
from benchmark.gpu.record import Record

INPUT_TOKENS, OUTPUT_TOKENS = 128, 256
START_LIMIT = 420.0  # seconds; the first start compiles kernels
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
    """A server of the model `name` for every variant, started side by side and ready; stopped whatever happens."""
    model = write_model(name)
    with ExitStack() as stack:
        servers = []
        for variant in variants:
            flags = ["--enable-metrics", *variant.server_args(), *runner_args(name), *SERVER_ARGS, *args]
            server = Server(model, flags, env=env, name=variant.policy or "off", deadline=START_LIMIT)
            stack.callback(server.stop)
            server.start()
            servers.append(server)
        for server in servers:
            server.wait()
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
    """Alternating rounds at one concurrency, kept under `key`: medians, ratios, and every round."""
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
    series = run_rounds(workload, variants, servers)
    summary = [asdict(row) for row in summarize(series)]
    record.add(key, workload=_plain(asdict(workload)), summary=summary, series=[one.record() for one in series])


def gain(point: Mapping[str, Any], index: int = 1) -> float:
    """Percent more output tokens a second than the first variant: the median of the ratios within each round."""
    return 100 * (point["summary"][index]["paired_ratio"]["median"] - 1)


def describe(point: Mapping[str, Any], index: int = 1) -> str:
    """Tokens a second before and after, and the active experts where the server counted them."""
    off, on = point["summary"][0], point["summary"][index]
    text = f"{off['throughput']['median']:.0f} -> {on['throughput']['median']:.0f} tokens/s"
    if on["experts_after"] is None:
        return text
    return f"{text}, {on['experts_before']:.1f} -> {on['experts_after']:.1f} experts"


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in content.items()}
