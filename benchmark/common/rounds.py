"""Alternating rounds of measurements.

All servers run at the same time and are measured in turns. They receive the same prompts within the same minutes, so a
change of the machine's speed affects all of them.
"""

import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmark.common.client import CLIENT
from benchmark.common.evidence import Evidence, evidence_between, read_settled_totals, read_totals
from benchmark.common.server import Server, has_gpu
from benchmark.common.variant import BASELINE, Variant

LEAST_OUTPUT = 4
"""The minimum output length that bench_serving's `custom` dataset accepts, in tokens."""
KEPT = ("completed", "total_output_tokens", "output_throughput", "median_tpot_ms", "median_ttft_ms", "accept_length")
"""The results of bench_serving that a record contains."""


@dataclass(frozen=True)
class Workload:
    """The requests that every variant receives.

    - `model`: the checkpoint folder, which also contains the tokenizer.
    - `texts`: the folder of held-out *.txt files from which the prompts are drawn.
    - `requests`: the number of requests in a round.
    - `concurrency`: the number of requests at a time.
    - `input_tokens` and `output_tokens`: the length of a prompt and of its continuation.
    - `seed`: the random seed of the prompts. Round r uses `seed + r`, so every round has different prompts.
    - `temperature`: the sampling temperature. 0 selects the likeliest token.

    Raises ValueError for fewer output tokens than bench_serving accepts.
    """

    model: Path
    texts: Path
    rounds: int = 5
    requests: int = 32
    concurrency: int = 16
    input_tokens: int = 8
    output_tokens: int = 32
    seed: int = 0
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.output_tokens < LEAST_OUTPUT:
            raise ValueError(f"output tokens must be at least {LEAST_OUTPUT} (got {self.output_tokens})")

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> "Workload":
        """Create a workload from its recorded fields."""
        return cls(**{**recorded, "model": Path(recorded["model"]), "texts": Path(recorded["texts"])})

    def __str__(self) -> str:
        lengths = f"{self.input_tokens} tokens in, {self.output_tokens} out"
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} alternating rounds"
        return f"{self.requests} requests, {self.concurrency} at a time, {lengths}, {rounds}"


@dataclass
class Series:
    """The rounds of one variant.

    `results` contains the results of bench_serving that `KEPT` names. `evidence` contains the server's own counts.
    """

    variant: Variant
    command: list[str] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> "Series":
        """Create a series from its recorded fields."""
        evidence = [Evidence(**one) for one in recorded["evidence"]]
        return cls(Variant.read(recorded["variant"]), recorded["command"], list(recorded["results"]), evidence)


@contextmanager
def serve(
    model: Path,
    variants: Sequence[Variant],
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    deadline: float | None = None,
    program: str = "sglang.launch_server",
) -> Iterator[list[Server]]:
    """Start the servers of all variants at the same time, and stop them at the end.

    `args` contains additional flags, and `env` contains additional environment variables. `program` is the Python
    module to run. A server must answer within `deadline` seconds, by default 180 s plus 60 s for each variant.
    Some variants share a server, see `find_host`.
    """
    hosts = [number if has_gpu() else find_host(variants, number) for number in range(len(variants))]
    with ExitStack() as stack:
        started: dict[int, Server] = {}
        for number in sorted(set(hosts)):
            server = started[number] = Server(
                model,
                ["--enable-metrics", *variants[number].server_args(), *args],
                env=env,
                name=variants[number].name,
                deadline=deadline or 180.0 + 60.0 * len(variants),
                program=program,
            )
            stack.callback(server.stop)
            server.start()
        for server in started.values():
            server.wait()
        yield [started[number] for number in hosts]


def find_host(variants: Sequence[Variant], number: int) -> int:
    """Return the index of the variant whose server also serves variant `number`.

    All policies with the same flags share one server. The variant `vanilla` also uses this server, unless it is the
    baseline. Its ratio then shows how much two servers differ without any policy. A server that was started without a
    policy cannot be switched. On a GPU, the captured graphs still contain the selection kernel after a switch
    to `vanilla`.
    """
    one = variants[number]
    if one.policy is None or (one.policy == BASELINE and number == 0):
        return number
    hosts = (
        other
        for other, variant in enumerate(variants)
        if variant.policy not in (None, BASELINE) and variant.args == one.args
    )
    return next(hosts, number)


def switch(server: Server, variant: Variant, servers: Sequence[Server]) -> None:
    """Activate the variant's policy and empty the cache. Do nothing if no other variant uses this server."""
    if servers.count(server) > 1:
        server.post("/expert_policy", variant.body())
        server.post("/flush_cache", {})


def order_round(count: int, number: int) -> list[int]:
    """Return the order in which to measure `count` variants in round `number`.

    Variant 0 is the baseline. The baseline runs between two other variants, and its position changes in each round.
    The other variants take turns at the first position. The order is reversed in odd rounds, so a drift of the
    machine's speed does not favour a variant.
    """
    turn = number // 2 % max(count - 1, 1)
    others = list(range(1, count))
    order = [*others[turn:], *others[:turn]]
    order.insert(1 + number % max(count - 2, 1), 0)
    return order[::-1] if number % 2 else order


def run_rounds(workload: Workload, series: Sequence[Series], servers: Sequence[Server]) -> Iterator[int]:
    """Measure the running servers in turns until every series contains all rounds.

    Yield the number of each round after every variant has completed it. Before the first round, each server is warmed
    up once at the full concurrency. A GPU server is also warmed up with one batch of the workload, because it compiles
    kernels for new batch sizes. No round uses the prompts of this batch.
    """
    turns = list(zip(series, servers, strict=True))
    warm_up = [list(range(1, workload.input_tokens + 1))] * workload.concurrency
    for one, server in turns:
        one.command = one.command or server.command
        server.generate(warm_up, max_new_tokens=8, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        if has_gpu():
            wave = replace(workload, requests=workload.concurrency, seed=workload.seed + workload.rounds)
            prompts = _write_prompts_of(wave, Path(folder))
            for server in dict.fromkeys(servers):
                CLIENT.run(server, wave, prompts)
        for number in range(len(series[0].results), workload.rounds):
            load = replace(workload, seed=workload.seed + number)
            prompts = _write_prompts_of(load, Path(folder))
            for one, server in (turns[place] for place in order_round(len(turns), number)):
                switch(server, one.variant, servers)
                _run(one, server, load, prompts)
            yield number


def _write_prompts_of(workload: Workload, folder: Path) -> Path:
    prompts = folder / f"{workload.seed}.jsonl"
    write_prompts(prompts, workload.texts, workload.model, workload.requests, workload.input_tokens, workload.seed)
    return prompts


def _run(series: Series, server: Server, workload: Workload, prompts: Path) -> None:
    before = read_totals(server)
    result = CLIENT.run(server, workload, prompts)
    evidence = evidence_between(before, read_settled_totals(server))
    series.results.append({name: result[name] for name in KEPT if name in result})
    series.evidence.append(evidence)
    experts = ""
    if evidence.experts_before is not None and evidence.experts_after is not None:
        experts = f", active experts {evidence.experts_before:.1f} -> {evidence.experts_after:.1f}"
    speed = f"{result['output_throughput']:.1f} tokens/s, {result['median_tpot_ms']:.1f} ms a token"
    print(f"round {len(series.results)}/{workload.rounds}  {series.variant.name}: {speed}{experts}", flush=True)


def write_prompts(out: Path, texts: Path, tokenizer: Path, count: int, tokens: int, seed: int) -> None:
    """Draw prompts and write them to `out`, in bench_serving's JSON Lines format."""
    # bench_serving requires two turns per conversation. It ignores the second turn if the output length is given.
    prompts = draw_prompts(texts, tokenizer, count, tokens, seed)
    rows = [{"conversations": [{"value": prompt}, {"value": ""}]} for prompt in prompts]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def draw_prompts(texts: Path, tokenizer: Path, count: int, tokens: int, seed: int) -> list[str]:
    """Return `count` distinct prompts of `tokens` tokens each, with equally many from every text file.

    `texts` is a folder of *.txt files, one for each domain. `tokenizer` is a folder that contains tokenizer.json.
    Different seeds give different prompts, so no round finds its prompts in the prefix cache. Raises ValueError if
    there is not enough text.
    """
    files = sorted(texts.glob("*.txt"))
    if not files:
        raise ValueError(f"texts must be a folder of held-out *.txt files (got {texts})")
    encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    rng = random.Random(seed)
    domains = [_cut_prompts(encode, path, tokens, rng) for path in files]
    drawn: dict[str, None] = {}
    for group in zip(*domains, strict=False):
        drawn |= dict.fromkeys(group)
        if len(drawn) >= count:
            break
    prompts = list(drawn)[:count]
    if len(prompts) < count:
        raise ValueError(f"texts {texts} must have {count} distinct prompts of {tokens} tokens (got {len(prompts)})")
    return prompts


def _cut_prompts(encode: Tokenizer, path: Path, tokens: int, rng: random.Random) -> Iterator[str]:
    """Yield pieces of `tokens` tokens in random order. Each piece starts at the beginning of a line."""
    lines = path.read_text().splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if line.strip()]
    rng.shuffle(starts)
    # Eight lines are long enough for every prompt of the benchmarks. Shorter pieces are skipped.
    pieces = (encode.encode("".join(lines[i : i + 8])).ids[:tokens] for i in starts)
    return (encode.decode(ids) for ids in pieces if len(ids) == tokens)
