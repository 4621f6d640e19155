"""Alternating rounds over servers that all stay up: each meets the same prompts in the same minutes of the machine."""

import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmark.common.client import Client, Load
from benchmark.common.evidence import Evidence, evidence_between, read_settled_totals, read_totals
from benchmark.common.prompts import write_prompts
from benchmark.common.server import Server
from benchmark.common.variant import Variant


@dataclass(frozen=True)
class Workload:
    """What every variant is given in every round.

    Attributes:
        model: the checkpoint's folder, tokenizer included.
        texts: folder of held-out *.txt files that the prompts are taken from.
        rounds: runs of each variant.
        requests: prompts a run, `concurrency` of them at a time.
        input_tokens, output_tokens: lengths of a prompt and of its greedy continuation.
        seed: chooses the prompts; round r has seed + r, and so prompts of its own.
    """

    model: Path
    texts: Path
    rounds: int = 5
    requests: int = 32
    concurrency: int = 16
    input_tokens: int = 8
    output_tokens: int = 32
    seed: int = 0


@dataclass
class Series:
    """One variant's runs: bench_serving's records, and what the server said of its policy meanwhile."""

    variant: Variant
    command: list[str]
    results: list[dict[str, Any]] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Everything of it, as JSON."""
        return asdict(self)


@contextmanager
def serve(model: Path, variants: Sequence[Variant], server_args: Sequence[str] = ()) -> Iterator[list[Server]]:
    """Every variant's server, started side by side and ready. They are stopped whatever happens, SIGTERM included."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with ExitStack() as stack:
        servers = []
        for variant in variants:
            args = ["--enable-metrics", *variant.server_args(), *server_args]
            # Started side by side, they share the cores.
            server = Server(model, args, name=variant.policy or "off", deadline=120.0 + 60.0 * len(variants))
            stack.callback(server.stop)
            server.start()
            servers.append(server)
        for server in servers:
            server.wait()
        yield servers


def run_rounds(workload: Workload, variants: Sequence[Variant], servers: Sequence[Server]) -> list[Series]:
    """Measure the running servers in turns; an idle one sleeps.

    Odd rounds go in reverse order, so that a drift of the machine's speed favours nobody. Each server is warmed up
    once at the full concurrency.
    """
    turns = [(Series(variant, server.command), server) for variant, server in zip(variants, servers, strict=True)]
    warm_up = [list(range(1, workload.input_tokens + 1))] * workload.concurrency
    for _, server in turns:
        server.generate(warm_up, max_new_tokens=8, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder, Client() as client:
        for number in range(workload.rounds):
            load = _load_of_round(workload, number, Path(folder))
            for series, server in turns if number % 2 == 0 else reversed(turns):
                _run(client, series, server, load, workload)
    return [series for series, _ in turns]


def compare(workload: Workload, variants: Sequence[Variant], server_args: Sequence[str] = ()) -> list[Series]:
    """Serve every variant at once and measure them in turns."""
    with serve(workload.model, variants, server_args) as servers:
        return run_rounds(workload, variants, servers)


def _load_of_round(workload: Workload, number: int, folder: Path) -> Load:
    prompts = folder / f"round-{number}.jsonl"
    seed = workload.seed + number
    write_prompts(prompts, workload.texts, workload.model, workload.requests, workload.input_tokens, seed)
    return Load(prompts, workload.requests, workload.concurrency, workload.output_tokens, seed)


def _run(client: Client, series: Series, server: Server, load: Load, workload: Workload) -> None:
    before = read_totals(server)
    result = client.run(server, workload.model, load)
    evidence = evidence_between(before, read_settled_totals(server))
    series.results.append(result)
    series.evidence.append(evidence)
    experts = ""
    if evidence.experts_before is not None and evidence.experts_after is not None:
        experts = f", active experts {evidence.experts_before:.1f} -> {evidence.experts_after:.1f}"
    speed = f"{result['output_throughput']:.1f} tokens/s, {result['median_tpot_ms']:.1f} ms a token"
    print(f"round {len(series.results)}/{workload.rounds}  {series.variant.name}: {speed}{experts}", flush=True)
