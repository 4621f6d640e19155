"""Expert-affinity dispatch, served: `python -m benchmark.affinity.live`.

Replicas of the trained checkpoint in fp32, kept full by requests of mixed domains: what each is answered, where it ran,
and how many experts were awake. The servers run one after another, so that each has all cores.
"""

import argparse
import hashlib
import random
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.affinity.texts import make_table
from benchmark.common.command import Parser, one_line_errors
from benchmark.common.evidence import read_totals
from benchmark.common.paths import BUILD, TEXTS, TRAINED
from benchmark.common.record import Record
from benchmark.common.server import Server
from benchmark.common.table import Table
from benchmark.quality.model import load_model
from benchmark.quality.text import load_sequences

METHODS = ("round_robin", "total_requests", "expert_affinity")
SAMPLES = 500
"""Moments at which running requests are counted."""


@dataclass(frozen=True)
class Request:
    """A prompt of token ids, and how many tokens follow."""

    prompt: list[int]
    tokens: int


@dataclass(frozen=True)
class Run:
    """What came of all requests. `outputs`: greedy tokens of each, in order; `replicas`: who ran it, -1 where the
    server does not say; `active` and `rows`: mean active experts and rows a layer and step, `imbalance`: largest over
    mean running requests, mean over time, all while the load was steady; `seconds`: of all.
    """

    outputs: list[list[int]]
    replicas: list[int]
    active: float
    rows: float
    imbalance: float
    seconds: float


def draw_requests(prompts: Sequence[list[int]], count: int, life: int, seed: int = 0) -> list[Request]:
    """Requests of prompts as likely each, `life` tokens in the mean, half of it at least and half more at most."""
    source = random.Random(seed)
    return [Request(source.choice(prompts), source.randint(life // 2, life * 3 // 2)) for _ in range(count)]


def run_requests(server: Server, requests: Sequence[Request], replicas: int, per_replica: int) -> Run:
    """Keep `per_replica` requests of each replica running until all are answered. The server observes its experts."""
    asker = _Asker(server, requests, concurrency=replicas * per_replica)
    answers = asker.run()
    first, last = asker.totals
    new = {name: last[name] - first.get(name, 0.0) for name in ("layer_steps", "experts_before", "rows")}
    spans = [(answer.replica, answer.began, answer.ended) for answer in answers]
    return Run(
        outputs=[answer.output for answer in answers],
        replicas=[answer.replica for answer in answers],
        active=new["experts_before"] / new["layer_steps"],
        rows=new["rows"] / new["layer_steps"],
        imbalance=measure_imbalance(spans, replicas, *asker.steady),
        seconds=max(answer.ended for answer in answers) - min(answer.began for answer in answers),
    )


def measure_imbalance(spans: Sequence[tuple[int, float, float]], replicas: int, start: float, end: float) -> float:
    """Largest over mean running requests, mean of moments between `start` and `end`, of (replica, began, ended)."""
    values = []
    for number in range(SAMPLES):
        moment = start + (end - start) * number / SAMPLES
        loads = [0] * replicas
        for replica, began, ended in spans:
            if replica >= 0:
                loads[replica] += began <= moment < ended
        if sum(loads):
            values.append(max(loads) * replicas / sum(loads))
    return sum(values) / len(values) if values else float("nan")


@dataclass(frozen=True)
class _Answer:
    output: list[int]
    replica: int
    began: float
    ended: float


class _Asker:
    """Asks for every request, in order, from as many threads as run at a time; looks at the counters as the load turns
    steady, once every thread has begun a second request, and as the last request begins.
    """

    def __init__(self, server: Server, requests: Sequence[Request], concurrency: int) -> None:
        if len(requests) < 3 * concurrency:
            raise ValueError(f"{len(requests)} requests, {concurrency} at a time: allowed are 3 times as many")
        self._server, self._requests, self._concurrency = server, requests, concurrency
        self._looks = {2 * concurrency: 0, len(requests) - 1: 1}
        self._lock = threading.Lock()
        self._begun = 0
        self.totals: list[dict[str, float]] = [{}, {}]
        self.steady = [0.0, 0.0]

    def run(self) -> list[_Answer]:
        """All answers, in order."""
        with ThreadPoolExecutor(self._concurrency) as threads:
            return list(threads.map(self._ask, range(len(self._requests))))

    def _ask(self, number: int) -> _Answer:
        with self._lock:
            look = self._looks.get(self._begun)
            self._begun += 1
        if look is not None:
            self.totals[look], self.steady[look] = read_totals(self._server), time.monotonic()
        request = self._requests[number]
        began = time.monotonic()
        (answer,) = self._server.generate([request.prompt], max_new_tokens=request.tokens, ignore_eos=True)
        replica = answer["meta_info"].get("dp_rank")
        return _Answer(answer["output_ids"], -1 if replica is None else replica, began, time.monotonic())


def make_args(method: str, replicas: int, table: Path, bound: float) -> list[str]:
    """The flags of a server with so many replicas that observes its experts."""
    flags = ["--dp-size", str(replicas), "--dtype", "float32", "--expert-policy", "observe", "--enable-metrics"]
    flags += ["--decode-log-interval", "4", "--disable-radix-cache", "--load-balance-method", method]
    if method == "expert_affinity":
        flags += ["--expert-affinity", str(table), "--expert-affinity-bound", str(bound)]
    return flags


def make_env(replicas: int) -> dict[str, str]:
    """SGLang's CPU server wants to be told which core each replica takes; two of them share one where they must."""
    return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(place % 2) for place in range(replicas))}


def main(argv: Sequence[str] | None = None) -> None:
    """Serve into the record, print the table."""
    parser = Parser("benchmark.affinity.live", __doc__)
    names = f"{', '.join(METHODS)} (default: all)"
    parser.add_argument("methods", nargs="*", metavar="METHOD", default=METHODS, help=names)
    parser.add_count("replicas", 4, "replicas of the model")
    parser.add_count("per_replica", 16, "requests at a time and replica")
    parser.add_count("requests", 512, "requests in all")
    parser.add_count("life", 48, "tokens of an answer, in the mean")
    parser.add_count("prompt", 64, "tokens a prompt")
    parser.add_count("per_domain", 60, "prompts of each domain")
    parser.add_count("calibration", 20_000, "tokens of each domain that the table is calibrated on")
    parser.add_argument("--bound", type=float, default=1.1, metavar="B", help="of the load (default: 1.1)")
    parser.add_record(BUILD / "affinity")
    args = parser.parse_args(argv)
    for name in args.methods:
        if name not in METHODS:
            parser.error(f"method {name!r}: allowed are {', '.join(METHODS)}")
    record = parser.open_record("live", args, argv)
    measure(args, record)
    tabulate_live(record.points).show()
    print(f"Record: {record.path}")


def measure(args: argparse.Namespace, record: Record) -> None:
    """Serve what the record lacks."""
    missing = [name for name in args.methods if name not in record]
    if not missing:
        return
    table = BUILD / "affinity" / "live.safetensors"
    make_table(load_model(TRAINED), TRAINED, args.calibration).save(table)
    texts = load_sequences(TEXTS, TRAINED, args.prompt, args.per_domain)
    requests = draw_requests(texts.tokens.tolist(), args.requests, args.life)
    for name in missing:
        flags = make_args(name, args.replicas, table, args.bound)
        with Server(TRAINED, flags, env=make_env(args.replicas), name=name, deadline=900) as server:
            run = run_requests(server, requests, args.replicas, args.per_replica)
        record.add(name, **{**vars(run), "outputs": [digest(output) for output in run.outputs]})


def digest(output: Sequence[int]) -> str:
    """What stands in the record for an answer's tokens."""
    return hashlib.sha256(" ".join(map(str, output)).encode()).hexdigest()[:16]


def tabulate_live(points: Mapping[str, Any]) -> Table:
    """A row a method: active experts, imbalance, and how many answers are the first row's, token for token."""
    first = next(iter(points.values()))
    rows = []
    for name, point in points.items():
        same = sum(one == other for one, other in zip(point["outputs"], first["outputs"], strict=True))
        counts = [point["replicas"].count(replica) for replica in sorted(set(point["replicas"]))]
        rows.append(
            [
                name,
                f"{point['active']:.1f}",
                f"{point['active'] / first['active'] - 1:+.1%}",
                f"{point['rows']:.1f}",
                f"{point['imbalance']:.2f}",
                " ".join(map(str, counts)),
                f"{same} / {len(first['outputs'])}",
            ]
        )
    headings = ["load balance method", "active experts", "change", "rows a step", "imbalance", "by replica", "same"]
    note = (
        "Active experts and rows: means of a layer and step. Imbalance: largest over mean running requests, mean over "
        "time. Same: answers with the first row's tokens."
    )
    return Table("Active experts by dispatch, served", headings, rows, note)


if __name__ == "__main__":
    with one_line_errors("affinity"):
        main()
