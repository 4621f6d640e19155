"""Alternating rounds over servers that all stay up: each meets the same prompts in the same minutes of the machine."""

import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmark.common.client import CLIENT, Load
from benchmark.common.evidence import Evidence, evidence_between, read_settled_totals, read_totals
from benchmark.common.server import Server, has_gpu
from benchmark.common.variant import BASELINE, Variant

LEAST_OUTPUT = 4
"""Of bench_serving's `custom` dataset, in tokens."""
KEPT = ("completed", "total_output_tokens", "output_throughput", "median_tpot_ms", "median_ttft_ms", "accept_length")
"""Of bench_serving's figures, those that somebody reads."""


@dataclass(frozen=True)
class Workload:
    """What every variant is given in every round: `requests` prompts, `concurrency` of them at a time, of so many
    tokens, each continued by so many: drawn at `temperature`, at 0 the likeliest.

    `model` is the checkpoint's folder, tokenizer included, `texts` that of held-out *.txt files, from which `seed`
    chooses the prompts; round r has seed + r, and so prompts of its own.

    Raises ValueError for fewer output tokens than bench_serving takes.
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
            raise ValueError(f"output tokens {self.output_tokens}: allowed is at least {LEAST_OUTPUT}")

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> "Workload":
        """One out of a record."""
        return cls(**{**recorded, "model": Path(recorded["model"]), "texts": Path(recorded["texts"])})

    def __str__(self) -> str:
        lengths = f"{self.input_tokens} tokens in, {self.output_tokens} out"
        rounds = "1 round" if self.rounds == 1 else f"{self.rounds} alternating rounds"
        return f"{self.requests} requests, {self.concurrency} at a time, {lengths}, {rounds}"


@dataclass
class Series:
    """One variant's runs: bench_serving's figures, as `KEPT`, and what the server said of its policy meanwhile."""

    variant: Variant
    command: list[str] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)

    @classmethod
    def read(cls, recorded: Mapping[str, Any]) -> "Series":
        """One out of a record."""
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
    """Every variant's server, started side by side with further flags and environment variables, ready, and stopped in
    the end. Without a GPU, those with a policy and the same flags share one, which `switch` switches. `deadline` is in
    seconds, by default what so many need that share the cores; `program` is the module that serves.
    """
    with ExitStack() as stack:
        servers: list[Server] = []
        for number, variant in enumerate(variants):
            first = next((other for other in range(number) if _share(variants[other], variant)), None)
            if first is not None:
                servers.append(servers[first])
                continue
            server = Server(
                model,
                ["--enable-metrics", *variant.server_args(), *args],
                env=env,
                name=variant.name,
                deadline=deadline or 180.0 + 60.0 * len(variants),
                program=program,
            )
            stack.callback(server.stop)
            server.start()
            servers.append(server)
        for server in dict.fromkeys(servers):
            server.wait()
        yield servers


def switch(server: Server, variant: Variant, servers: Sequence[Server]) -> None:
    """Have a server that is several variants' among `servers` run the policy of this one, from an empty cache."""
    if servers.count(server) > 1:
        server.post("/expert_policy", variant.body())
        server.post("/flush_cache", {})


def _share(one: Variant, other: Variant) -> bool:
    never = (None, BASELINE)  # a server that was started so cannot be switched
    return not (has_gpu() or one.policy in never or other.policy in never) and one.args == other.args


def run_rounds(workload: Workload, series: Sequence[Series], servers: Sequence[Server]) -> Iterator[int]:
    """Measure the running servers in turns, an idle one asleep, until every series has the workload's rounds.

    Yields the number of each round when all series hold it. Odd rounds go in reverse order, so that a drift of the
    machine's speed favours nobody. Each server is warmed up once at the full concurrency; on a GPU, where kernels are
    compiled for new batch sizes, by as many requests of the workload itself, too, with prompts of no round.
    """
    turns = list(zip(series, servers, strict=True))
    warm_up = [list(range(1, workload.input_tokens + 1))] * workload.concurrency
    for one, server in turns:
        one.command = one.command or server.command
        server.generate(warm_up, max_new_tokens=8, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        if has_gpu():
            wave = replace(workload, requests=workload.concurrency)
            load = _load_of_round(wave, workload.rounds, Path(folder))
            for server in dict.fromkeys(servers):
                CLIENT.run(server, workload.model, load)
        for number in range(len(series[0].results), workload.rounds):
            load = _load_of_round(workload, number, Path(folder))
            for one, server in turns if number % 2 == 0 else reversed(turns):
                switch(server, one.variant, servers)
                _run(one, server, load, workload)
            yield number


def _load_of_round(workload: Workload, number: int, folder: Path) -> Load:
    prompts = folder / f"round-{number}.jsonl"
    seed = workload.seed + number
    write_prompts(prompts, workload.texts, workload.model, workload.requests, workload.input_tokens, seed)
    sent = workload.requests, workload.concurrency, workload.output_tokens
    return Load(prompts, *sent, seed, workload.temperature)


def _run(series: Series, server: Server, load: Load, workload: Workload) -> None:
    before = read_totals(server)
    result = CLIENT.run(server, workload.model, load)
    evidence = evidence_between(before, read_settled_totals(server))
    series.results.append({name: result[name] for name in KEPT if name in result})
    series.evidence.append(evidence)
    experts = ""
    if evidence.experts_before is not None and evidence.experts_after is not None:
        experts = f", active experts {evidence.experts_before:.1f} -> {evidence.experts_after:.1f}"
    speed = f"{result['output_throughput']:.1f} tokens/s, {result['median_tpot_ms']:.1f} ms a token"
    print(f"round {len(series.results)}/{workload.rounds}  {series.variant.name}: {speed}{experts}", flush=True)


def write_prompts(out: Path, texts: Path, tokenizer: Path, count: int, tokens: int, seed: int) -> None:
    """Write `count` distinct prompts of `tokens` tokens, evenly from every text, as JSON lines to `out`.

    `texts` is a folder of *.txt files, each one domain, `tokenizer` one with tokenizer.json. Other seeds give other
    prompts, so that no round finds its prompts in the prefix cache. Raises ValueError for no text, or too little of it.
    """
    files = sorted(texts.glob("*.txt"))
    if not files:
        raise ValueError(f"texts {texts}: no *.txt file there; needed is a folder of held-out texts")
    encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    rng = random.Random(seed)
    domains = [_draw_prompts(encode, path, tokens, rng) for path in files]
    drawn: dict[str, None] = {}
    for group in zip(*domains, strict=False):
        drawn |= dict.fromkeys(group)
        if len(drawn) >= count:
            break
    prompts = list(drawn)[:count]
    if len(prompts) < count:
        raise ValueError(f"texts {texts}: {len(prompts)} distinct prompts of {tokens} tokens; needed are {count}")
    # bench_serving wants two turns; the second only matters where no output length is given.
    rows = [{"conversations": [{"value": prompt}, {"value": ""}]} for prompt in prompts]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _draw_prompts(encode: Tokenizer, path: Path, tokens: int, rng: random.Random) -> Iterator[str]:
    """Stretches of `tokens` tokens that start at the beginning of a line, in random order."""
    lines = path.read_text().splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if line.strip()]
    rng.shuffle(starts)
    # Eight lines hold any prompt we ask for; a stretch that ends early is left out.
    stretches = (encode.encode("".join(lines[i : i + 8])).ids[:tokens] for i in starts)
    return (encode.decode(ids) for ids in stretches if len(ids) == tokens)
