"""Alternating rounds over servers that all stay up: each gets the same prompts in the same minutes of the machine."""

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
"""The least output of bench_serving's `custom` dataset, in tokens."""
KEPT = ("completed", "total_output_tokens", "output_throughput", "median_tpot_ms", "median_ttft_ms", "accept_length")
"""Figures of bench_serving that a record keeps."""


@dataclass(frozen=True)
class Workload:
    """The load of every variant in every round: `requests` prompts of `input_tokens`, `concurrency` at a time.

    Each prompt is continued by `output_tokens`, drawn at `temperature`; 0 takes the likeliest. `model` is the
    checkpoint's folder, tokenizer included, `texts` the folder of held-out *.txt files, from which `seed` chooses the
    prompts; round r has the seed `seed + r`, and so prompts of its own.

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
        """Read the recorded fields."""
        return cls(**{**recorded, "model": Path(recorded["model"]), "texts": Path(recorded["texts"])})

    def __str__(self) -> str:
        lengths = f"{self.input_tokens} tokens in, {self.output_tokens} out"
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} alternating rounds"
        return f"{self.requests} requests, {self.concurrency} at a time, {lengths}, {rounds}"


@dataclass
class Series:
    """One variant's runs: bench_serving's figures named in `KEPT`, and the server's counts of its policy meanwhile."""

    variant: Variant
    command: list[str] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> "Series":
        """Read the recorded fields."""
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
    """Start every variant's server side by side, with further flags and environment variables; stop all at the end.

    Variants share servers as `find_host` describes. `deadline` is in seconds until a server must answer, by default
    180 and 60 more for each variant; `program` is the module that serves.
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
    """Return the number of the variant whose server, started with a policy, also serves variant `number`.

    Policies with the same flags share the server of the first of them. So does `vanilla` if it is not the baseline: its
    ratio shows how far two servers differ without any policy. A server without a policy cannot be switched. On a GPU a
    switch to `vanilla` leaves the selection kernel in the captured graphs.
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
    """Activate a variant's policy, with an empty cache, if its server is that of several variants of `servers`."""
    if servers.count(server) > 1:
        server.post("/expert_policy", variant.body())
        server.post("/flush_cache", {})


def order_round(count: int, number: int) -> list[int]:
    """Return the order of `count` variants in round `number`; variant 0 is the baseline.

    The baseline runs between two other variants, at another place in each round, and the others take turns at the
    first place. Odd rounds run in reverse order, so a drift of the machine's speed favours no variant.
    """
    turn = number // 2 % max(count - 1, 1)
    others = list(range(1, count))
    order = [*others[turn:], *others[:turn]]
    order.insert(1 + number % max(count - 2, 1), 0)
    return order[::-1] if number % 2 else order


def run_rounds(workload: Workload, series: Sequence[Series], servers: Sequence[Server]) -> Iterator[int]:
    """Measure the running servers in turns, as `order_round` orders them, until every series has all rounds.

    Yield the number of each round when all series hold the round. Warm up each server once at the full concurrency. On
    a GPU, which compiles kernels for new batch sizes, also warm up by equally many requests of the workload, whose
    prompts no round has.
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
    """Write the prompts of `draw_prompts` as bench_serving's JSON lines to `out`."""
    # bench_serving requires two turns; the second matters only without an output length.
    prompts = draw_prompts(texts, tokenizer, count, tokens, seed)
    rows = [{"conversations": [{"value": prompt}, {"value": ""}]} for prompt in prompts]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def draw_prompts(texts: Path, tokenizer: Path, count: int, tokens: int, seed: int) -> list[str]:
    """Return `count` distinct prompts of `tokens` tokens, evenly from every text.

    `texts` is a folder of *.txt files, each one domain, `tokenizer` one with tokenizer.json. Other seeds give other
    prompts, so no round finds its prompts in the prefix cache. Raises ValueError for no text, or too little text.
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
    """Yield pieces of `tokens` tokens that start at the beginning of a line, in random order."""
    lines = path.read_text().splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if line.strip()]
    rng.shuffle(starts)
    # Eight lines hold every prompt that the benchmarks send; a piece that ends early is skipped.
    pieces = (encode.encode("".join(lines[i : i + 8])).ids[:tokens] for i in starts)
    return (encode.decode(ids) for ids in pieces if len(ids) == tokens)
